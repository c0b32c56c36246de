"""Numbers: elements of arrays, to the bit, also of types that numpy lacks.

In reading order:

- `elements`: element types as numpy has them;
- `casting`: numbers of one type as those of another;
- `exponential`: exp, bit for bit the same in numpy and torch.
"""
