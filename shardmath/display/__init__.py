"""Display: values for people.

In reading order:

- `pictures`: values as text, SVG and HTML;
- `traces`: timelines of the work of ranks, measured or modeled;
- `explorer`: a page on which layouts are typed, and drawn and proved;
- `arguments`: what commands share: parsers, JSON, errors;
- `commands`: the commands that need only the core;
- `completion`: scripts for shells;
- `cli`: `python -m shardmath`.
"""
