"""Families: how each family of models and engines names its tensors, as data in and values out.

In reading order:

- `hf`: Hugging Face's names;
- `hf_plans`: which part of each parameter a rank loads where transformers carries its plans out;
- `styles`: how tensor parallelism divides which layer;
- `rules`: which tensors of a model lie how, in one line of text;
- `megatron`: what the ranks of a Megatron trainer hold;
- `vllm`: what the ranks of a vLLM engine hold;
- `megatron_rows`: what each module of Megatron-Core stores, as rows;
- `megatron_shapes`: the logical tensors of a Megatron-Core configuration;
- `megatron_core`: what each rank of a Megatron-Core trainer stores, under its own names.
"""
