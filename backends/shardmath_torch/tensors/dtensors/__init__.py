"""DTensors: as layouts, moved, and made of plain modules.

In reading order:

- `devicemesh`: DeviceMeshes, Meshes and process groups;
- `placements`: DTensor placements as layouts, and back;
- `styles`: how tensor parallelism divides weights, by name;
- `placed`: the record of a module's divided parameters, and the DTensors that it applies to;
- `dtensor`: `from_dtensor`, `to_dtensor`;
- `moves`: compiled moves, cached;
- `redistribute`: `redistribute`, with gradients;
- `modules`: `layout_of`;
- `tensor_parallel`: `set_device_mesh`;
- `scales`: `amax`.
"""
