"""Exports: models for other people's tools and engines, from any layouts.

In reading order:

- `sources`: what is exported, and who holds what of it;
- `export`: `export`.
"""
