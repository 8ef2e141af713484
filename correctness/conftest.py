"""Hypothesis' profiles for the accuracy tests: pytest --hypothesis-profile=ci (the default), dev or nightly.

No profile has a deadline: it would judge the machine. `ci` draws the same examples each time, so that a run fails for a
change and for nothing else. `dev` draws others every time, and `nightly` many more, of larger shapes
(strategies.budget).
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Hypothesis' own default is another one where CI is set: nothing that matters is left to it.
_COMMON = settings(deadline=None, derandomize=False, print_blob=True, suppress_health_check=[HealthCheck.too_slow])

settings.register_profile("ci", _COMMON, max_examples=12, derandomize=True, database=None)
settings.register_profile("dev", _COMMON, max_examples=12)
settings.register_profile("nightly", _COMMON, max_examples=300)
settings.load_profile("ci")


def pytest_configure() -> None:
    """Have processes that a pytest-xdist worker starts measure: in a worker pytest-benchmark does not."""
    os.environ.pop("PYTEST_XDIST_WORKER", None)
