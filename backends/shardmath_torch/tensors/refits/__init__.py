"""Refits: a trainer's module and an engine's module, bound to a refit by their own names.

In reading order:

- `before`: a snapshot of modules and mappings before a loader runs;
- `operations`: what operations of torch read and write;
- `threads`: a function that runs first in the threads that a loader starts, and modes for these;
- `collectives`: operations between ranks, and barriers, which only one call carries out;
- `contents`: elements of a logical tensor in the memory of a tensor without data;
- `watching`: a run of a loader without data;
- `reads`: the tensors without data that a loader reads;
- `numbering`: runs of a loader on element numbers;
- `functions`: the functions of the built-in systems, and whether a loader computes them;
- `targets`: the tensors into which a loader loads;
- `recording`: a rank's storage, recorded by either;
- `divided`: comparison of DTensors with a plan;
- `views`: views of stored tensors, by the local tensors of a plan;
- `holders`: the mappings and modules that hold tensors, checked before each move;
- `gathered`: FSDP2's gathered copies of the parameters into which a refit moves;
- `refit`: stored tensors bound once, and moved any number of times.
"""
