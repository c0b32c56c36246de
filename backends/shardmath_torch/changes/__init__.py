"""Changes: moves that send only what changed since the move before.

In reading order:

- `comparing`: which cells of a tensor differ from what it held before;
- `packets`: numbered elements as bytes;
- `parcels`: what really goes of each message;
- `sparse`: what a rank sends and receives of changed elements;
- `walking`: the rounds of a plan, of which only what changed is sent;
- `carrying`: a carrier of what has changed, and of all where that is asked for;
- `changes`: `compile_changes`.
"""
