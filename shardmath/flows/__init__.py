"""Flows: integers on a network of ranks; nothing here knows of tensors.

In reading order:

- `topology`: ranks per node, link rates;
- `network`: maximum flows, decomposed into levels;
- `flow`: exact min-max balance over sets of holders;
- `bound`: bounds that no schedule beats.
"""
