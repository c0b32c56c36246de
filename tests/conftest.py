"""Hypothesis profiles by HYPOTHESIS_PROFILE, `quick` for make test, `deep` for test-all, `mutate` for mutate; and what
pytest-xdist has to leave together.
"""

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "quick", max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
settings.register_profile("deep", max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
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


TOGETHER = ("tests/distributed/", "tests/readme/", "tests/gpu/")
"""Tests that start processes: one after the other on one worker, which has the pool; the others run beside them."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Spreads tests one by one, but for those of TOGETHER and the cells of a notebook."""
    from xdist.scheduler import LoadScopeScheduling

    class Spread(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(TOGETHER):
                return "processes"
            file = nodeid.partition("::")[0]
            return file if file.startswith("notebooks/") else nodeid

    return Spread(config, log)
