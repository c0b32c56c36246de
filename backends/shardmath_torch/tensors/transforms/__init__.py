"""Transforms: what travels is not what is held, in torch.

In reading order:

- `quantising`: data and scales, made of numbers and read again;
- `functions`: what transforms do, on tensors;
- `packing`: what a rank holds, without holes;
- `workers`: what one rank does for one of its tensors;
- `megatron`: hooks of Megatron-Core as transforms;
- `agreeing`: what ranks agree on before they agree on a plan;
- `compile`: two sides and what travels between them, made ready;
- `amaxes`: parts of a tensor whose blocks ranks cut.
"""
