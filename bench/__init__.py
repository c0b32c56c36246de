"""Bench: the project's own instruments, run in a checkout: `python -m bench COMMAND`.

In reading order:

- `systems`: what real trainers and engines are called, and which rows say what they store;
- `recorded`: that rows say what these store;
- `models`: the shapes of real models;
- `mappings`: which model goes from which trainer to which engines;
- `table`: real models from a trainer's storage to an engine's, beside what was published.
"""
