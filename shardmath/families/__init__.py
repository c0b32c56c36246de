"""Families: how each family of models and engines names its tensors, as data in and values out.

In reading order:

- `hf`: Hugging Face's names;
- `styles`: how tensor parallelism divides which layer;
- `rules`: which tensors of a model lie how, in one line of text;
- `megatron`: what the ranks of a Megatron trainer hold;
- `vllm`: what the ranks of a vLLM engine hold.
"""
