"""Checkpoints: what ranks hold, saved, and loaded under other layouts.

In reading order:

- `claims`: which saves are going on, and what dead ones left;
- `stored`: checkpoints as they are found;
- `saving`: which rank writes which boxes;
- `writing`: how they get onto the disk;
- `verifying`: which checksums a rank looks at;
- `loading`: which bytes are a rank's;
- `checkpoint`: `save`, `load`.
"""
