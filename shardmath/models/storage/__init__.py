"""Storage: the tensors that trainers and engines really store, declared in rows of text.

In reading order:

- `names`: patterns of tensors' names;
- `structure`: the written form of how components lie along one dimension;
- `cutting`: the positions that a structure stores at one coordinate;
- `rows`: one stored parameter per line;
- `laying`: the position of each component in one stored tensor;
- `stored`: a side as rows, meshes and numbers;
- `owners`: the ranks that have each number of a row's indices;
- `binding`: the row that stores each tensor, and where each rank has it;
- `arranging`: the orders in which kernels want the cells of a whole stored tensor;
- `filling`: conversion of logical arrays into stored tensors, and back, cell by cell.
"""
