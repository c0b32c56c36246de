"""Display: values for people.

In reading order:

- `pictures`: values as text, SVG and HTML;
- `traces`: timelines of the work of ranks, measured or modeled;
- `cli`: `python -m shardmath`.
"""
