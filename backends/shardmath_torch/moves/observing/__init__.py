"""Observing: what a move does on this rank, and how long each part of it takes.

In reading order:

- `laps`: what a call's time goes into, by name;
- `traffic`: what a rank sends and receives, by peer;
- `moved`: what a move did, for people and programs;
- `logs`: a line per move;
- `bars`: progress, told to a callback and shown on a terminal;
- `spelling`: what was timed of a call, as spans;
- `tracing`: `trace`, which writes what is timed inside it;
- `stopwatch`: one call, timed.
"""
