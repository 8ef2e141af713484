"""How long each GEMM of a layer takes: with the quantizations that are done for it, alone, and those by themselves."""

from __future__ import annotations

import pytest

from benches.harness.replay import REPLAY


@pytest.mark.benchmark(timer=REPLAY)
@pytest.mark.usefixtures("model", "recipe", "regime", "mode", "pass_name", "linear")
def test_gemm(gemms, measure):
    """One GEMM, or its quantizations."""
    measure(gemms)
