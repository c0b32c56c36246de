"""Changes: moves that send only what changed since the move before.

In reading order:

- `comparing`: which cells of a tensor differ from what it held before;
- `packets`: numbered elements as bytes;
- `parcels`: what really goes of each message;
- `sparse`: what a rank sends and receives of changed elements;
- `walking`: the rounds of a plan, of which only what changed is sent;
- `changes`: `compile_changes`.
"""
