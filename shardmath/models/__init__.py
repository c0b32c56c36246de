"""Models: how trainers and engines name and store weights.

In reading order:

- `storage`: how they really store tensors, declared in rows of text;
- `recordings`: what ranks store as their loaders were seen to store it, in the place of rows;
- `systems`: what Megatron, vLLM, SGLang, torchtitan and Hugging Face store;
- `refits`: a trainer's stored weights into engines that store them otherwise.
"""
