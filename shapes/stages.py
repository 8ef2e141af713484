"""The steps from plain PyTorch to te.TransformerLayer, as a table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """What the parts of a layer are made of. `fused` parts combine a norm with the linears behind it."""

    id: str
    linear: str  # torch or te
    norm: str  # torch or te
    attention: str  # explicit, sdpa or te
    fused: str  # no, modules or layer
    description: str

    @property
    def backend(self) -> str:
        """`torch` runs anywhere, `te` needs Transformer Engine and a GPU."""
        return self.linear


STAGES: dict[str, Stage] = {
    stage.id: stage
    for stage in (
        Stage("torch", "torch", "torch", "explicit", "no", "PyTorch, attention written out"),
        Stage("torch_sdpa", "torch", "torch", "sdpa", "no", "PyTorch with scaled_dot_product_attention"),
        Stage("te_modules", "te", "te", "sdpa", "no", "+ te.Linear, te.LayerNorm or te.RMSNorm"),
        Stage("te_attention", "te", "te", "te", "no", "+ te.DotProductAttention"),
        Stage("te_fused", "te", "te", "te", "modules", "+ te.LayerNormLinear, te.LayerNormMLP"),
        Stage("te_layer", "te", "te", "te", "layer", "te.TransformerLayer"),
    )
}
