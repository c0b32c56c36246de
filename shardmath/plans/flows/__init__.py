"""Flows: integers on a network of ranks, without tensors.

In reading order:

- `topology`: ranks per node, link rates;
- `network`: maximum flows, decomposed into levels;
- `forest`: flows freed of cycles and rounded;
- `flow`: exact min-max balance over sets of holders;
- `shedding`: the bytes of each line that other ranks have to relay;
- `certificate`: a time compared with a bound;
- `blocks`: the elements that have to move, as values and as arrays;
- `borders`: the bytes that must cross the border of a set of ranks, and the rate of its links;
- `bound`: bounds that no schedule beats.
"""
