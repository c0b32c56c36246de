"""Sizes: laws of layouts, decided for all sizes of a tensor by finitely many.

In reading order:

- `settling`: from which length on the parts of a dimension grow linearly;
- `lengths`: sets of lengths that are periodic from some length on;
- `verdict`: what was decided, how, and the smallest counterexample;
- `family`: one dimension at every length, and how many lengths decide about it;
- `whole`: whether ranks hold each element once;
- `equal`: whether two layouts give each rank the same elements;
- `prove`: both laws for whole layouts.
"""
