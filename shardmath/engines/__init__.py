"""Engines: how engines, checkpoints and trainers of Hugging Face models store weights, as rows.

In reading order:

- `config`: the fields of a Hugging Face configuration, by any of their names;
- `reading`: which logical tensors one rank stores, from the shapes of what it stores;
- `hf_rows`: where a Hugging Face checkpoint's tensor is several logical tensors, or has another name;
- `hf_core`: how a checkpoint stores a model, and which logical tensors a checkpoint has;
- `vllm_names`: what a kind of model calls its modules in vLLM, and which of them every pipeline stage has;
- `vllm_rows`: what each module of vLLM stores, as rows;
- `vllm_core`: what each rank of a vLLM engine stores, under its own names;
- `sglang_rows`: what each module of SGLang stores, as rows;
- `sglang_core`: what each rank of an SGLang engine stores, under its own names;
- `torchtitan`: what each rank of a torchtitan trainer stores, under its own names.
"""
