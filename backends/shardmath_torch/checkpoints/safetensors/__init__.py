"""Safetensors: headers proved, slices read, files and folders written.

In reading order:

- `headers`: what a file says of its tensors;
- `weights`: the tensors of a checkpoint by name;
- `slices`: a rank's local tensors;
- `hf_sharded`: files that torch left in shards;
- `archive`: files that are torch.save archives too;
- `strided`: the tensors in archives, described;
- `hf_split`: which tensors go into which file;
- `hf_folder`: folders as Hugging Face's tools keep them.
"""
