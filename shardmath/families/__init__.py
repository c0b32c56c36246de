"""Families: how each family of models and engines names its tensors, as data in and values out."""
