"""Display: values for people.

In reading order:

- `pictures`: values as text, SVG and HTML;
- `traces`: what takes time on ranks, measured or modelled, on one line of time;
- `cli`: `python -m shardmath`.
"""
