"""shardmath_hypothesis: lets `st.from_type(Layout)` draw, once both hypothesis and shardmath are imported.

hypothesis calls `register` when it is imported, in every project of an environment that has shardmath. So nothing is
imported here: strategies take half a second, numpy included, and most of those projects never ask for them.
"""

from __future__ import annotations

import sys

__all__ = ["register"]


def register() -> None:
    """Register shardmath's strategies with hypothesis if shardmath is imported; if not, shardmath does so on import."""
    from_type = sys.modules.get("shardmath.layouts.from_type")
    if from_type is not None:
        from_type.register_strategies()
