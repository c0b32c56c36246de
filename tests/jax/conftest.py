"""Tests against JAX itself: eight CPU devices in this process, and jobs of `jax.distributed` in others."""

from __future__ import annotations

import os

# Read when jax starts its CPU client, so before any test imports jax.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
