"""The steps from plain PyTorch to te.TransformerLayer, and the ways in which a layer is executed, as tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """What the parts of a layer are made of. `fused` parts combine a norm with the linears behind it."""

    id: str
    linear: str  # and the norms: torch or te
    attention: str  # explicit, sdpa or te
    fused: str  # no, modules or layer

    @property
    def backend(self) -> str:
        """`torch` runs anywhere, `te` needs Transformer Engine and a GPU."""
        return self.linear


STAGES: dict[str, Stage] = {
    stage.id: stage
    for stage in (
        Stage("torch", "torch", "explicit", "no"),  # attention written out, as tutorials start
        Stage("torch_sdpa", "torch", "sdpa", "no"),  # scaled_dot_product_attention, as PyTorch's users do
        Stage("te_modules", "te", "sdpa", "no"),  # + te.Linear and te.LayerNorm or te.RMSNorm
        Stage("te_attention", "te", "te", "no"),  # + te.DotProductAttention
        Stage("te_fused", "te", "te", "modules"),  # + te.LayerNormLinear and te.LayerNormMLP
        Stage("te_layer", "te", "te", "layer"),  # te.TransformerLayer
    )
}


@dataclass(frozen=True)
class Execution:
    """How a layer's step is executed.

    `graph`: forward and backward are replayed as CUDA graphs. `cached_weights`: weights are quantized in the first
    microbatch of an optimizer step only, and this is one of the others.
    """

    id: str
    graph: bool
    cached_weights: bool


EXECUTIONS: dict[str, Execution] = {
    execution.id: execution
    for execution in (
        Execution("eager", graph=False, cached_weights=False),  # and weights quantized in each step: TE's defaults
        Execution("eager_cached", graph=False, cached_weights=True),
        Execution("graph", graph=True, cached_weights=False),
        Execution("graph_cached", graph=True, cached_weights=True),
    )
}
