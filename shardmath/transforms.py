"""`shardmath.transforms`: what is sent where it is not what is held: casts, computed parameters, your functions."""

from shardmath.base.moved import forward_names
from shardmath.values.transforms.components import AsHeld, Companion, Component, Form, Transform
from shardmath.values.transforms.custom import Custom
from shardmath.values.transforms.pointwise import Cast, NegativeExp
from shardmath.values.transforms.quantizing import Dequantize, Quantize, Requantize
from shardmath.values.transforms.transformed import Transformed, transformed

__all__ = [
    "AsHeld",
    "Cast",
    "Companion",
    "Component",
    "Custom",
    "Dequantize",
    "Form",
    "NegativeExp",
    "Quantize",
    "Requantize",
    "Transform",
    "Transformed",
    "transformed",
]

__getattr__ = forward_names(
    "shardmath.transforms",
    {
        "Dequantise": "shardmath.transforms.Dequantize",
        "Quantise": "shardmath.transforms.Quantize",
        "Requantise": "shardmath.transforms.Requantize",
    },
)
