"""Safetensors: headers checked, slices read, files and folders written.

In reading order:

- `headers`: names, shapes and places of a file's tensors;
- `weights`: the tensors of a checkpoint by name;
- `slices`: a rank's local tensors;
- `hf_sharded`: files that torch wrote per rank;
- `archive`: files that are torch.save archives too;
- `strided`: the tensors in archives, described;
- `hf_split`: tensors divided into files;
- `hf_folder`: folders as Hugging Face's tools keep them.
"""
