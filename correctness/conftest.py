"""What the accuracy tests share."""

from __future__ import annotations

import pytest

from benches.harness.stash import SELECTION


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """`cuda` or `cpu`, as --device says."""
    return pytestconfig.stash[SELECTION].device
