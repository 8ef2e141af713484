"""How layer and sweep are compared: which of their kernels do the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benches.prediction import (
    Fusion,
    Prediction,
    Seconds,
    Turns,
    end_to_end,
    fusion,
    layer_seconds,
    loops,
    middle,
    sweep_seconds,
    table,
)
from correctness.suite.fake_timeline import MS, TICK, FakeTimeline, Step
from shapes.models import MODELS

AMAX = "void transformer_engine::(anonymous namespace)::amax_kernel<16, true, __nv_bfloat16>(__nv_bfloat16 const*)"
ZERO_AMAX = "transformer_engine::(anonymous namespace)::zero_amax_kernel(float*, float const*)"
SCALE = "transformer_engine::(anonymous namespace)::compute_scale_from_amax_kernel(float const*, float*)"
TRANSPOSE = "transpose_optimized_kernel(__nv_fp8_e4m3 const*, float const*, __nv_fp8_e4m3*)"
CAST = "cast_transpose_optimized_kernel(__nv_bfloat16 const*, float const*, __nv_fp8_e4m3*)"
CAST_AND_BIAS = "cast_transpose_fusion_kernel_optimized(transformer_engine::CTDBiasDActParam<__nv_bfloat16, float>)"
GEMM = "nvjet_sm90_qqtst_192x192_128x4_2x1_v_bz_coopB_TNN"
NORM = "void transformer_engine::normalization::ln_fwd_tuned_kernel<__nv_bfloat16>(int)"


def test_a_kernel_takes_from_the_end_of_the_ones_before_it_to_its_own() -> None:
    """A gap belongs to the kernel after it; of kernels at the same time the later end counts."""
    assert end_to_end([("a", 1.0, 2.0), ("b", 2.5, 4.0), ("inside", 3.0, 3.5), ("c", 4.0, 4.5)]) == [
        ("a", 1.0),
        ("b", 2.0),
        ("inside", 0.0),
        ("c", 0.5),
    ]
    assert end_to_end([]) == []


def test_the_layer_s_kernels_are_gemms_quantizations_or_neither() -> None:
    """A norm is neither; what delayed scaling leaves of a fused quantization is told apart from a whole one."""
    kernels = [(GEMM, 4.0), (CAST, 1.0), (TRANSPOSE, 0.5), (CAST_AND_BIAS, 0.25), (NORM, 8.0)]
    fused = fusion("fp8_delayed_scaling", MODELS["codonfm_5b"])
    assert layer_seconds(kernels, fused) == Seconds(4.0, 1.75, fused=0.75)
    assert layer_seconds(kernels, Fusion()) == Seconds(4.0, 1.75)


def test_of_current_scaling_s_quantizations_the_amax_is_fused() -> None:
    """Only that of the three inputs behind a norm or an activation."""
    pieces = [("qkv/quantize_x", 3.0), ("qkv/quantize_w", 2.0), ("qkv/fprop", 9.0), ("attn_out/quantize_x", 1.0)]
    kernels = [(ZERO_AMAX, 0.1), (AMAX, 1.0), (SCALE, 0.1), (AMAX, 0.5), (GEMM, 9.0), (AMAX, 0.25)]
    fused = fusion("fp8_current_scaling", MODELS["codonfm_5b"])
    assert sweep_seconds(pieces, kernels, fused) == Seconds(9.0, 6.0, fused=1.0)


def test_a_quantization_without_its_amax_kernel_is_an_error() -> None:
    """Rather than one that takes another's time."""
    fused = fusion("fp8_current_scaling", MODELS["codonfm_5b"])
    with pytest.raises(ValueError, match="zip"):
        sweep_seconds([("qkv/quantize_x", 3.0), ("qkv/quantize_w", 2.0)], [(AMAX, 1.0)], fused)


def test_delayed_scaling_fuses_whole_quantizations() -> None:
    """The bias's gradient is summed up with qkv's cast only where there is a bias."""
    pieces = [("qkv/quantize_x", 3.0), ("qkv/quantize_w", 2.0), ("qkv/fprop", 9.0), ("qkv/quantize_dy", 1.0)]
    with_bias = fusion("fp8_delayed_scaling", MODELS["codonfm_5b"])
    without = fusion("fp8_delayed_scaling", replace(MODELS["codonfm_5b"], bias=False))
    assert sweep_seconds(pieces, [], with_bias) == Seconds(9.0, 6.0, fused=4.0)
    assert sweep_seconds(pieces, [], without) == Seconds(9.0, 6.0, fused=3.0)


def test_other_recipes_fuse_nothing() -> None:
    """Then all is compared."""
    assert fusion("fp8_block_scaling", MODELS["codonfm_5b"]) == Fusion()
    assert sweep_seconds([("qkv/quantize_x", 3.0), ("qkv/fprop", 9.0)], [], Fusion()).alike == 12.0


def test_differences_are_of_what_both_do_alike() -> None:
    """Sweep 1 + 10 ms without 1, layer 9.5 + 1 ms without 0.5: no difference."""
    layer, sweep = Seconds(9.5e-3, 1e-3, 0.5e-3), Seconds(10e-3, 1e-3, 1e-3)
    one = Prediction(layer, sweep, loops=Seconds(11e-3, 1e-3, 1e-3))
    assert one.difference(one.sweep) == pytest.approx(0.0)
    assert one.difference(one.loops) == pytest.approx(0.1)
    line = table({"fp8_current_scaling": one}).splitlines()[1].split()
    assert line[:5] == ["fp8_current_scaling", "9.500", "+", "1.000", "(0.500)"]
    assert line[5:9] == ["10.000", "+", "1.000", "(1.000)"]
    assert [word for word in line if "%" in word] == ["+0.0%", "+10.0%"]


def test_the_median_turn_is_taken_part_by_part() -> None:
    """Not the turn whose whole is in the middle."""
    assert middle([Seconds(1, 9, 0), Seconds(2, 8, 2), Seconds(3, 1, 1)]) == Seconds(2, 8, 1)


class TestTurns:
    """Layer and sweep in turn, on a simulated device."""

    def test_the_sweep_s_pieces_are_timed_by_events_between_them(self) -> None:
        """A turn is a spin, the layer, a spin and the sweep, and nothing waits in between."""
        timeline = FakeTimeline()
        layer = Step(timeline, {"forward": (TICK, 3 * MS)})
        sweep = Step(timeline, {"qkv/fprop": (TICK, 2 * MS), "qkv/dgrad": (TICK, MS)})
        turns = Turns(layer.program(), sweep.program(), timeline)
        turns.run(30 * MS)
        assert turns.sweep_times() == [[("qkv/fprop", 2 * MS), ("qkv/dgrad", MS)]] * layer.rounds
        assert timeline.end_s == pytest.approx(layer.rounds * 6 * MS, rel=0.01)
        assert timeline.log[:4] == ["spin", "reset", "forward", "spin"]

    def test_a_loop_is_divided_by_its_calls(self) -> None:
        """Each segment's own time."""
        timeline = FakeTimeline()
        sweep = Step(timeline, {"qkv/fprop": (TICK, 2 * MS), "qkv/dgrad": (TICK, MS)})
        assert dict(loops(sweep.program(), timeline)) == pytest.approx({"qkv/fprop": 2 * MS, "qkv/dgrad": MS})
