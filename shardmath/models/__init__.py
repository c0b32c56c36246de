"""Models: how trainers and engines name and store weights.

In reading order:

- `storage`: how they really store tensors, declared in rows of text;
- `recordings`: storage recorded from an engine's loader, instead of declared by rows;
- `systems`: what Megatron, vLLM, SGLang, torchtitan and Hugging Face store;
- `refits`: a trainer's stored weights into engines that store them otherwise.
"""
