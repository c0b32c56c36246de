"""Checkpoints: what ranks hold, saved, and loaded under other layouts.

In reading order:

- `files`: bytes on disk or behind a URL, read as if strangers had written them;
- `safetensors`: headers proved, slices read, files and folders written;
- `commits`: which saves are running, and what dead ones left;
- `stored`: a checkpoint as a value;
- `index`: the index that `save` writes, as JSON;
- `opening`: what a folder holds, from indices and headers;
- `saving`: which rank writes which boxes;
- `writing`: how boxes get onto the disk;
- `verifying`: which checksums a rank checks;
- `loading`: which bytes a rank needs;
- `reading`: how bytes get into a rank's tensors;
- `checkpoint`: `save`, `load`;
- `states`: a module and its optimizers, saved and restored;
- `weights`: a module's weights from any checkpoint, quantized ones too;
- `exports`: models for other people's tools and engines.
"""
