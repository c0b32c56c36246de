"""Changes: moves that send only what changed since the move before.

In reading order:

- `differing`: where two rows of words differ;
- `comparing`: which cells of a tensor differ from what it held before;
- `packets`: numbered elements as bytes;
- `parcels`: the part of each message that is sent;
- `sorting`: a rank's changed cells, divided into messages;
- `placing`: received elements, written into destination tensors;
- `walking`: the rounds of a plan, with only changes sent;
- `carrying`: a carrier of changes, or of everything on request;
- `changes`: `compile_changes`.
"""
