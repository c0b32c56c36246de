"""Hypothesis profiles by HYPOTHESIS_PROFILE: `quick` for make test, `deep` for test-all, `mutate` for mutate."""

import os

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
