"""Checkpoints: what ranks hold, saved, and loaded under other layouts.

In reading order:

- `files`: bytes on disk or behind a URL, read as if strangers had written them;
- `safetensors`: headers proved, slices read, files and folders written;
- `commits`: which saves are going on, and what dead ones left;
- `stored`: a checkpoint as a value;
- `index`: our index as JSON;
- `opening`: checkpoints as they are found;
- `saving`: which rank writes which boxes;
- `writing`: how they get onto the disk;
- `verifying`: which checksums a rank looks at;
- `loading`: which bytes are a rank's;
- `reading`: how they get into its tensors;
- `checkpoint`: `save`, `load`;
- `states`: what a module and its optimizers need to go on, saved and restored;
- `weights`: a module's weights from any checkpoint, quantised ones too;
- `exports`: models for other people's tools and engines.
"""
