"""Models: shapes and flat buffers of real models.

In reading order:

- `flat_buffers`: flat buffers of real parameters;
- `configs`: models known without a network;
- `shapes`: shapes of a model on the meta device.
"""
