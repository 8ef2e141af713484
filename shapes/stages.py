"""The steps from plain PyTorch to te.TransformerLayer, as a table."""

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
