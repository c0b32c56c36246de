"""Transforms: moves that send other tensors than ranks hold, in torch.

In reading order:

- `quantizing`: data and scales, made of numbers and read again;
- `functions`: transforms applied to tensors;
- `packing`: a rank's positions of a tensor, without holes;
- `workers`: one end of one rank's tensor, made for sending or after receiving;
- `megatron`: hooks of Megatron-Core as transforms;
- `agreeing`: votes on transforms, before ranks agree on a plan;
- `compile`: two sides and their wire tensors, compiled;
- `amaxes`: quantizing parts of a tensor when layouts cut blocks.
"""
