"""Dtensors."""
