"""Hypothesis profiles by HYPOTHESIS_PROFILE, `quick` for make test, `deep` for test-all, `mutate` for mutate; and what
pytest-xdist has to leave together.
"""

import os
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "quick",
    max_examples=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
settings.register_profile(
    "deep", max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile(
    "mutate",
    max_examples=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# torch's store looks up who connects, in its only thread; where DNS loses queries, glibc waits 5 s for each.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

TOGETHER = re.compile("tests/distributed/[^/]+/|tests/readme/|tests/gpu/|notebooks/[^:]+")
"""What runs on one worker, in order: what shares a pool of processes, a folder, or a kernel."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the longest test to the front, and give notebooks more time.

    A cell may import all of torch, which takes long beside tests that have eight processes each.
    """
    # Workers that have nothing left to do would wait for it at the end.
    items.sort(key=lambda item: not item.nodeid.startswith("tests/soak/"))
    for item in items:
        if item.nodeid.startswith("notebooks/"):
            item.add_marker(pytest.mark.timeout(600))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Spreads tests one by one, but for those of TOGETHER."""
    from xdist.scheduler import LoadScopeScheduling

    class Spread(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            shared = TOGETHER.match(nodeid)
            return shared[0] if shared else nodeid

    return Spread(config, log)
