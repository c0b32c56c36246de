"""DTensors: as layouts, moved, and made of plain modules.

In reading order:

- `devicemesh`: DeviceMeshes, Meshes and process groups;
- `placements`: DTensor placements as layouts, and back;
- `styles`: how tensor parallelism divides weights, by name;
- `placed`: what a module remembers of that, and which DTensors it is true of;
- `dtensor`: `from_dtensor`, `to_dtensor`;
- `moves`: compiled moves, kept;
- `redistribute`: `redistribute`, with gradients;
- `modules`: `layout_of`;
- `tensor_parallel`: `set_device_mesh`;
- `scales`: `amax`.
"""
