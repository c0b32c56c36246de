"""Refits: a trainer's module and an engine's module, bound to a refit by their own names.

In reading order:

- `before`: modules and mappings as they were before a loader ran;
- `targets`: the tensors into which a loader loads;
- `contents`: what lies in the memory of a tensor without data;
- `watching`: a loader run without data;
- `numbering`: a loader run on element numbers;
- `recording`: what a loader stores where, by either;
- `divided`: DTensors compared with a plan;
- `views`: views of stored tensors, by the local tensors of a plan;
- `holders`: where tensors were found, and whether they still are there;
- `gathered`: what FSDP2 has gathered of the parameters into which a refit moves;
- `refit`: stored tensors bound once, and moved as often as wanted.
"""
