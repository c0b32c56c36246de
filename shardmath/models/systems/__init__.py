"""Systems: the names and storage of weights in Megatron, vLLM, SGLang, torchtitan and Hugging Face.

In reading order:

- `hf`: Hugging Face's names;
- `config`: the fields of a Hugging Face configuration, by any of their names;
- `rules`: the layouts of a model's tensors, in one line of text;
- `reading`: the logical tensors of one rank, from the shapes of its stored tensors;
- `placing`: the pipeline stage of each layer, and the sizes of a mesh's axes;
- `hf_plans`: the part of each parameter that a rank loads under a plan of transformers;
- `hugging_face_rows`: Hugging Face checkpoints as rows, by kind of model;
- `hugging_face`: the storage of a model in a checkpoint, and the logical tensors of a checkpoint;
- `megatron_rows`: the stored tensors of each module of Megatron-Core, as rows;
- `megatron_shapes`: the logical tensors of a Megatron-Core configuration;
- `megatron`: the storage of a Megatron-Core trainer, under its own names;
- `vllm_names`: the names of a kind of model's modules in vLLM, and those on every pipeline stage;
- `vllm_rows`: the stored tensors of each module of vLLM, as rows;
- `vllm`: the storage of a vLLM engine, under its own names;
- `sglang_rows`: the stored tensors of each module of SGLang, as rows;
- `sglang`: the storage of an SGLang engine, under its own names;
- `torchtitan`: the storage of a torchtitan trainer, under its own names;
- `former`: layouts of Megatron trainers and vLLM engines, from shapes without a configuration.
"""
