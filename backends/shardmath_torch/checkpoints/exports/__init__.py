"""Exports: models for other people's tools and engines, from any layouts.

In reading order:

- `sources`: the tensors of an export, and their layouts;
- `export`: `export`.
"""
