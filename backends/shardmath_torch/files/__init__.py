"""Files: bytes on disk or behind a URL, read as if strangers had written them.

In reading order:

- `places`: folders and URLs;
- `locks`: one writer at a time;
- `checksums`: checksums of stored boxes;
- `json_text`: JSON of strangers;
- `weights`: safetensors, read by slices;
- `hf_sharded`: safetensors that torch left in shards;
- `archive`: safetensors that are torch.save archives too;
- `hf_folder`: folders as Hugging Face's tools keep them;
- `unpickled`: torch's `.metadata`, by an allow-list;
- `sealed`: `.metadata` with our index behind it.
"""
