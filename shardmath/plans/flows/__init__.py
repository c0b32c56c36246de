"""Flows: integers on a network of ranks; nothing here knows of tensors.

In reading order:

- `topology`: ranks per node, link rates;
- `network`: maximum flows, decomposed into levels;
- `forest`: flows freed of cycles and rounded;
- `lines`: bytes that any of their holders may send, checked and grouped;
- `flow`: exact min-max balance over sets of holders;
- `shedding`: how much of each line others have to relay;
- `certificate`: how near a time is to a bound;
- `blocks`: what has to move, as values and as arrays;
- `borders`: what must cross the border of a set of ranks, and how fast;
- `bound`: bounds that no schedule beats.
"""
