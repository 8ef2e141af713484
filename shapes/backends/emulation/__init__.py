"""The quantized recipes in plain torch, on any device: formats and rounding, scaling, the linear and its GEMMs."""
