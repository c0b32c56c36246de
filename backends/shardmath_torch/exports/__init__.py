"""Exports: models for other people's tools and engines, from any layouts.

In reading order:

- `export`: `export`.
"""
