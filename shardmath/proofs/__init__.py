"""Proofs: that plans and programs do what their layouts ask for.

In reading order:

- `shapes`: whether what is read are tables at all;
- `templates`: whether the rows and units that tensors share are well formed;
- `tables`: whether a plan's demands are well formed, and where in meshes their ranks are;
- `batches`: whether a plan's batches move its tensors as they lie;
- `plan_proof`: that a plan's tables bring every element home, once;
- `program_proof`: that a program delivers what its plan promises, without deadlock;
- `part_proof`: that what ranks post, round by round, is what the plan says;
- `claims`: that transfers made elsewhere do, one by one;
- `simulate`: what a plan or program means, in numpy;
- `verify`: the proof of a plan, a program, or a list of transfers.
"""
