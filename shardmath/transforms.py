"""`shardmath.transforms`: what is sent where it is not what is held: casts, computed parameters, your functions."""

from shardmath.values.transforms.components import AsHeld, Companion, Component, Form, Transform
from shardmath.values.transforms.custom import Custom
from shardmath.values.transforms.pointwise import Cast, NegativeExp
from shardmath.values.transforms.quantising import Dequantise, Quantise, Requantise
from shardmath.values.transforms.transformed import Transformed, transformed

__all__ = [
    "AsHeld",
    "Cast",
    "Companion",
    "Component",
    "Custom",
    "Dequantise",
    "Form",
    "NegativeExp",
    "Quantise",
    "Requantise",
    "Transform",
    "Transformed",
    "transformed",
]
