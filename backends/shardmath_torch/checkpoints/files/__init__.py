"""Files: bytes on disk or behind a URL, read as untrusted input.

In reading order:

- `places`: folders and URLs;
- `steps`: steps of a collective call;
- `locks`: one writer at a time;
- `checksums`: checksums of stored boxes;
- `json_text`: untrusted JSON;
- `unpickled`: torch's `.metadata`, by an allow-list;
- `sealed`: `.metadata` with an index at its end.
"""
