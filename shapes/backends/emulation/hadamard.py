"""The random Hadamard transform that Transformer Engine applies to NVFP4's column-wise copies."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

SIZE = 16

# Fixed, in spite of its name: get_wgrad_sign_vector in pytorch/tensor/nvfp4_tensor.py.
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@cache
def hadamard_matrix(device: torch.device) -> Tensor:
    """The orthogonal matrix (16, 16), float32, by which TE multiplies groups of 16 from the right.

    A row of Sylvester's Hadamard matrix divided by 4, for each sign. All entries are 1/4 or -1/4.
    """
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < SIZE:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    return torch.tensor(_SIGNS, device=device)[:, None] * matrix * SIZE**-0.5


def transform(x: Tensor) -> Tensor:
    """x (rows, columns), float32, with each 16 rows mixed, and rounded to bf16's precision, in float32.

    TE multiplies bf16 values with tensor cores that accumulate in float32, and rounds to bf16 (`hadamard_transform.cu`
    in common/hadamard_transform). How the cores cut off addends more than 24 bits below the largest is not published:
    where that decides the rounding to bf16, the last bit may differ. Raises ValueError where 16 does not divide rows.
    """
    return _mixed(x, hadamard_matrix(x.device).T).bfloat16().float()


def inverse_transform(x: Tensor) -> Tensor:
    """What `transform` was applied to, but for its rounding."""
    return _mixed(x, hadamard_matrix(x.device))


def _mixed(x: Tensor, matrix: Tensor) -> Tensor:
    if x.shape[0] % SIZE:
        raise ValueError(f"the random Hadamard transform needs a multiple of {SIZE} rows, got {x.shape[0]}")
    return torch.matmul(matrix, x.reshape(-1, SIZE, x.shape[1])).view(x.shape)
