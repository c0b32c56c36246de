"""Checkpoints: what ranks hold, saved, and loaded under other layouts.

In reading order:

- `commits`: which saves are going on, and what dead ones left;
- `stored`: a checkpoint as a value;
- `index`: our index as JSON;
- `opening`: checkpoints as they are found;
- `saving`: which rank writes which boxes;
- `writing`: how they get onto the disk;
- `verifying`: which checksums a rank looks at;
- `loading`: which bytes are a rank's;
- `reading`: how they get into its tensors;
- `checkpoint`: `save`, `load`.
"""
