"""Files: bytes on disk or behind a URL, read as if strangers had written them.

In reading order:

- `places`: folders and URLs;
- `steps`: of a call that all ranks make;
- `locks`: one writer at a time;
- `checksums`: checksums of stored boxes;
- `json_text`: JSON of strangers;
- `unpickled`: torch's `.metadata`, by an allow-list;
- `sealed`: `.metadata` with our index behind it.
"""
