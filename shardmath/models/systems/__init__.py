"""Systems: how Megatron, vLLM, SGLang, torchtitan and Hugging Face name and store weights.

In reading order:

- `hf`: Hugging Face's names;
- `config`: the fields of a Hugging Face configuration, by any of their names;
- `rules`: which tensors of a model lie how, in one line of text;
- `reading`: which logical tensors one rank stores, from the shapes of what it stores;
- `placing`: the pipeline stage of each layer, and the sizes of a mesh's axes;
- `hf_plans`: which part of each parameter a rank loads where transformers carries its plans out;
- `hugging_face_rows`: where a Hugging Face checkpoint's tensor is several logical tensors, or has another name;
- `hugging_face`: how a checkpoint stores a model, and which logical tensors a checkpoint has;
- `megatron_rows`: what each module of Megatron-Core stores, as rows;
- `megatron_shapes`: the logical tensors of a Megatron-Core configuration;
- `megatron`: what each rank of a Megatron-Core trainer stores, under its own names;
- `vllm_names`: what a kind of model calls its modules in vLLM, and which of them every pipeline stage has;
- `vllm_rows`: what each module of vLLM stores, as rows;
- `vllm`: what each rank of a vLLM engine stores, under its own names;
- `sglang_rows`: what each module of SGLang stores, as rows;
- `sglang`: what each rank of an SGLang engine stores, under its own names;
- `torchtitan`: what each rank of a torchtitan trainer stores, under its own names;
- `former`: what Megatron trainers and vLLM engines hold, as layouts from shapes alone.
"""
