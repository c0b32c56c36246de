"""`shardmath.content`: numbers that stand for what tensors hold, however they are laid out."""

from shardmath.values.digests.content import Difference, digest_of, find_difference

__all__ = ["Difference", "digest_of", "find_difference"]
