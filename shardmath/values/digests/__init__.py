"""Digests: numbers that identify a tensor's content, however it is laid out.

In reading order:

- `field`: arithmetic modulo a prime, and a random weight for each position;
- `pieces`: a local array as pieces whose weights are products;
- `weighing`: the weighted sum of an array's elements;
- `patches`: a tensor as disjoint patches, and the ranks that hold each;
- `shares`: each rank's contribution to a digest, and comparison of replicas;
- `bounds`: a search for the box in which two sides differ;
- `content`: `digest_of` and `find_difference`.
"""
