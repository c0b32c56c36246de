"""Proofs: that plans and programs do what their layouts ask for.

In reading order:

- `shapes`: checks that the tables of a plan have the right types and dimensions;
- `templates`: checks that the rows and units that tensors share are well formed;
- `tables`: checks that a plan's demands are well formed, and positions of ranks in meshes;
- `batches`: checks that a plan's batches move its tensors as their layouts say;
- `plan_proof`: proof that a plan's tables deliver every element exactly once;
- `program_proof`: proof that a program delivers what its plan promises, without deadlock;
- `part_proof`: proof that the messages that ranks post, round by round, are the plan's;
- `claims`: proof of transfers made by other code, transfer by transfer;
- `sizes`: laws of layouts, decided for all sizes of a tensor by finitely many;
- `simulate`: the meaning of a plan or program, in numpy;
- `verify`: the proof of a plan, a program, or a list of transfers.
"""
