"""Traces: timelines of the work of ranks, measured or modeled.

In reading order:

- `spans`: intervals of a rank's work, and traces made of them;
- `chrome`: traces as files that Perfetto and Chrome open;
- `merging`: traces of several ranks as one, their clocks aligned;
- `model`: the timeline of a program in its cost model;
- `drawing`: a trace as SVG.

`smt.trace` measures moves; `python -m shardmath trace` merges what its ranks wrote.
"""
