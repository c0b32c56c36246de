"""Digests: numbers that stand for what a tensor holds, however it is laid out.

In reading order:

- `field`: arithmetic modulo a prime, and a random weight for each position;
- `pieces`: a local array as pieces whose weights are products;
- `weighing`: the weighted sum of what is in an array;
- `patches`: what ranks hold, as disjoint patches, and who holds each;
- `shares`: what each rank adds to a digest, and that replicas are alike;
- `bounds`: the box in which two sides differ, found by halves of halves;
- `content`: `digest_of` and `find_difference`.
"""
