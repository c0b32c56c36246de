"""Models: shapes and flat buffers of real ones.

In reading order:

- `flat_buffers`: flat buffers of real parameters;
- `shapes`: shapes of a model on the meta device.
"""
