"""Changes: moves that send only what changed since the move before.

In reading order:

- `differing`: where two rows of words differ;
- `comparing`: which cells of a tensor differ from what it held before;
- `packets`: numbered elements as bytes;
- `parcels`: what really goes of each message;
- `sorting`: what a rank sends of changed cells, message by message;
- `placing`: what a rank receives of changed elements, put where it belongs;
- `walking`: the rounds of a plan, of which only what changed is sent;
- `carrying`: a carrier of what has changed, and of all where that is asked for;
- `changes`: `compile_changes`.
"""
