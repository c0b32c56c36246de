"""Storage: how trainers and engines really store tensors, declared in rows of text.

In reading order:

- `names`: patterns of tensors' names;
- `structure`: how components lie along one dimension, as written;
- `cutting`: what a structure stores at one coordinate;
- `rows`: one stored parameter a line;
- `laying`: where each component of one stored tensor lies;
- `stored`: a side as rows, meshes and numbers;
- `owners`: which ranks have which numbers of a row's indices;
- `binding`: which row stores which tensor, and where each rank has it;
- `filling`: stored tensors from logical arrays, and back, cell by cell.
"""
