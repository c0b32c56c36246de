"""The package, and SGLang's Python files, of which no build for CPUs exists."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "integrations")]
