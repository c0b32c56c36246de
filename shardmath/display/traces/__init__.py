"""Traces: what takes time on ranks, measured or modelled, on one line of time.

In reading order:

- `spans`: what takes time on a rank, and traces made of it;
- `chrome`: traces as files that Perfetto and Chrome open;
- `merging`: traces of several ranks as one, their clocks aligned;
- `model`: what a program does, in the times of its model;
- `drawing`: a trace as SVG.

`smt.trace` measures moves; `python -m shardmath trace` merges what its ranks wrote.
"""
