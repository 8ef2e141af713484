"""How long a transformer layer takes: every stage and recipe, forward, backward and both."""

from __future__ import annotations

import pytest

from benches.harness.replay import REPLAY


@pytest.mark.benchmark(timer=REPLAY)
@pytest.mark.usefixtures("model", "stage", "recipe", "execution", "regime", "pass_name")
def test_layer(layer, measure):
    """One pass of the layer."""
    measure(layer)
