"""Display: values for people.

In reading order:

- `pictures`: values as text, SVG and HTML;
- `traces`: timelines of the work of ranks, measured or modeled;
- `explorer`: a page on which layouts are typed, and drawn and proved;
- `cli`: `python -m shardmath`.
"""
