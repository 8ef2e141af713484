"""Which GEMMs ran: their record, how PyTorch's are seen, and how a record differs from what was to run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# The public way to see every operation, though its module's name begins with an underscore (PyTorch's documentation,
# "Extending PyTorch", section on __torch_dispatch__).
from torch.utils._python_dispatch import TorchDispatchMode

from shapes.gemms import Gemm

PLAIN_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class ExecutedGemm:
    """A GEMM that ran: sizes as in shapes.gemms.Gemm, operands as Recipe.gemm_operands orders and prints them.

    `pass_name` and `layout` (cuBLAS's, as TN) are empty for a matrix product of PyTorch, which knows neither.
    """

    pass_name: str
    m: int
    n: int
    k: int
    operands: tuple[str, ...]
    layout: str = ""
    accumulate: bool = False
    split_accumulator: bool = False

    def __str__(self) -> str:
        return f"{self.pass_name or 'mm'} m={self.m} n={self.n} k={self.k} {' x '.join(self.operands)}"


def plain_format(tensor: Tensor) -> str:
    """`bf16`, `fp16`, `fp32`, or PyTorch's name of another dtype."""
    return PLAIN_FORMATS.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


class _Matmuls(TorchDispatchMode):
    """Notes products of two matrices; batched ones, as attention has them, are none of a linear."""

    def __init__(self, only_captured: bool) -> None:
        super().__init__()
        self.only_captured = only_captured
        self.seen: list[ExecutedGemm] = []

    def note(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and remembers it if it is a product."""
        factors = {"mm": args[:2], "addmm": args[1:3]}.get(func.overloadpacket.__name__)
        if factors and (not self.only_captured or torch.cuda.is_current_stream_capturing()):
            a, b = factors
            formats = (plain_format(a), plain_format(b))
            self.seen.append(ExecutedGemm("", a.shape[0], b.shape[1], a.shape[1], formats))
        return func(*args, **(kwargs or {}))


# Not in the class's body: there PyTorch 2.13 wraps it, and the first operation imports its compiler, for a second.
_Matmuls.__torch_dispatch__ = _Matmuls.note  # type: ignore[assignment, method-assign]


@contextmanager
def record_matmuls(only_captured: bool = False) -> Iterator[list[ExecutedGemm]]:
    """Collect every matrix product that PyTorch executes inside the block, in order, backward passes included.

    With `only_captured` only those that go into a CUDA graph.
    """
    with _Matmuls(only_captured) as mode:
        yield mode.seen


def differences(planned: Sequence[ExecutedGemm], executed: Sequence[ExecutedGemm]) -> str | None:
    """In one sentence, how the GEMMs that ran differ from the planned ones in anything but their order; None if not.

    Compared are pass, sizes and operand formats. PyTorch's products have no pass: then none is compared.
    """
    known = all(gemm.pass_name for gemm in executed)

    def key(gemm: ExecutedGemm) -> ExecutedGemm:
        return ExecutedGemm(gemm.pass_name if known else "", gemm.m, gemm.n, gemm.k, gemm.operands)

    wanted, ran = Counter(map(key, planned)), Counter(map(key, executed))
    missing, extra = wanted - ran, ran - wanted
    if not missing and not extra:
        return None
    return f"planned but not executed: {_listed(missing)}; executed but not planned: {_listed(extra)}"


def _listed(gemms: Counter[ExecutedGemm]) -> str:
    """The first of them and how many more there are: all in a line would be too long to read."""
    if not gemms:
        return "none"
    first = next(iter(gemms))
    more = sum(gemms.values()) - 1
    return f"{first}" + (f" and {more} more" if more else "")


def planned_gemms(gemms: Iterable[Gemm], operands: Callable[[str], Iterable[object]]) -> list[ExecutedGemm]:
    """GEMMs with the operand formats that `operands(pass_name)` gives for each."""
    return [
        ExecutedGemm(gemm.pass_name, gemm.m, gemm.n, gemm.k, tuple(map(str, operands(gemm.pass_name))))
        for gemm in gemms
    ]
