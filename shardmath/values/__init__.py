"""Values: tensors that change on their way, and comparisons of their content.

In reading order:

- `formats`: weights as numbers of few bits, and scales that blocks of them share;
- `transforms`: casts, computed parameters, functions that users write;
- `amaxes`: the exchange between ranks that cut blocks of a quantized tensor;
- `digests`: numbers that identify a tensor's content, however it is laid out;
- `changes`: routing of the elements that changed since the last move.
"""
