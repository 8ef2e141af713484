"""What a kernel is, read from the name that the profiler gives it, and the sum of what ran.

The names are those of TE 2.20 on Hopper (seen) and Blackwell (from TE's library), of PyTorch 2.11, cuBLAS, cuDNN,
FlashAttention and Inductor. They are nobody's interface: a new release may rename a kernel, which then counts as
`other` and is shown, never lost.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

CATEGORIES = (
    "gemm_fp8",
    "gemm_fp4",
    "gemm_bf16",
    "gemm_other",
    "quantize",
    "attention",
    "norm",
    "activation",
    "elementwise",
    "copy",
    "memset",
    "other",
)
LONGEST_NAME = 100  # characters of a short name
LAUNCHES = 100  # of kernels with next to no work: the control short_kernels, whose time is divided by it

# Kernels are categorized by their plain names (`_plain`): a parameter's type says nothing about what a kernel does.
GEMM = r"^(?=.*(?:nvjet|cutlass|xmma|gemm|gemv|Gemm))"
NVJET = r"nvjet_(?:sm\d+[a-z]?_)?"  # next come letters for A, B, C, compute, D: q E4M3, r E5M2, o E2M1, t BF16, s FP32

# The first rule found in a plain name decides. No rule knows NCCL and the spin kernel, which is the stopwatch's mark.
RULES = (
    ("copy", r"^Memcpy"),
    ("memset", r"^Memset"),
    # Before gemm: FlashAttention is written with CUTLASS. Whatever cuDNN, TE and FlashAttention launch around it is
    # attention too, and so is softmax. Not here: RoPE (elementwise, as in PyTorch), and the batched GEMMs and masks of
    # explicit attention, whose names are like any other's.
    ("attention", r"flash_|flash::|compute_dot_do_o|convert_dq_to|(?i:fmha|sdpa|attention|soft_?max)"),
    ("attention", r"fused_attn::|context_parallel::|kv_cache::|_to_bhsd"),
    # Before quantize and activation: norms that cast, or that apply an activation, as well.
    ("norm", r"(?i:layer_?norm|rms_?norm)|(?<![a-z])ln_(?:fwd|bwd)|GammaBeta|RowwiseMoments|^triton_\w*rsqrt"),
    # Before gemm: TE's random Hadamard transform is a small GEMM inside a cast to FP4; and the bias gradient that
    # cuBLASLt computes in a kernel of its own.
    ("quantize", r"rht_gemm"),
    ("elementwise", r"globalKernelBgrad"),
    # Before the formats: the sum over a split K and other epilogues are part of a GEMM, but their names say what they
    # write and not what was multiplied.
    ("gemm_other", r"cublasLt::|splitKreduce"),
    # FP4 before FP8: its scales are E4M3. FP8 before BF16: BF16 is what it writes.
    ("gemm_fp4", rf"{NVJET}o|{GEMM}.*(?i:e2m1|fp4|xf4_)"),
    ("gemm_fp8", rf"{NVJET}[qr]|{GEMM}.*(?i:e4m3|e5m2|fp8)"),
    ("gemm_bf16", rf"{NVJET}t|{GEMM}.*(?:bf16|BF16|bfloat16)"),
    ("gemm_other", rf"{GEMM}|^triton_(?:tem|mm)_"),
    # After gemm, whose epilogue may be a ReLU. Before quantize: activations that cast as well. TE's `triton_*tanh*` is
    # its fused bias and GELU; PyTorch's ReLU is a clamp, and a threshold backward.
    ("activation", r"(?i:glu|gelu|silu|relu|sigmoid|tanh|gated)|clamp_scalar|threshold_kernel"),
    ("elementwise", r"^triton_"),
    # Casts to and from FP8 and FP4 and all that is done for them. The NVRTC kernel cast_transpose_fusion is here
    # with its bias gradient; where it computes an activation's gradient as well, its name does not say so.
    ("quantize", r"quantize|cast_transpose|transpose_(?:optimized|general)_kernel|transpose_dbias|\bidentity\b"),
    ("quantize", r"[aA]max|Hadamard|swizzle|block_scal|mxfp8|nvfp4|cast_fp8|tensor_scale_inv|float8_copy"),
    # Between FP32 and 16 bits PyTorch converts with its copy kernels.
    ("copy", r"copy_kernel|CatArrayBatchedCopy|padding_kernel|pad_last_dim|swap_first_dims|copy_host_to_device"),
    ("memset", r"FillFunctor|memset"),
    ("elementwise", r"elementwise_kernel|reduce_kernel|multi_tensor_apply|triu_tril|rope_|dbias|bias_add|dropout"),
)

# How a name gets plain. Each rule is repeated until it finds nothing, then all of them; none makes the name longer.
NAMESPACES = "at::native|at|c10|std|cute|transformer_engine|normalization|dispatch|detail|binary_internal|memory"
DTYPES = {
    r"__nv_bfloat16|c10::BFloat16|cutlass::bfloat16_t": "bf16",
    r"__half|c10::Half|cutlass::half_t": "fp16",
    r"__nv_fp8_e4m3|cutlass::float_e4m3_t|c10::Float8_e4m3fn": "e4m3",
    r"__nv_fp8_e5m2|cutlass::float_e5m2_t|c10::Float8_e5m2": "e5m2",
    r"__nv_fp4_e2m1|__nv_fp4x2_e2m1|cutlass::float_e2m1_t": "e2m1",
}


def _with_dtypes(found: re.Match[str]) -> str:
    """A kernel's name with the formats of 16 bits and fewer in its parameters, each once, as if it were a template."""
    kernel, parameters = found.groups()
    dtypes = dict.fromkeys(re.findall(rf"\b(?:{'|'.join(DTYPES.values())})\b", parameters))
    return f"{kernel}<{','.join(dtypes)}>" if dtypes else kernel


PLAIN: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"^void |^\s+|\s+$|\(anonymous namespace\)::", ""),
    (r"^cudnn_generated_fort_native_", "cudnn_"),
    (r"\bpytorch_flash::", ""),  # PyTorch's copy of FlashAttention; what comes with the package is in flash::
    *((rf"\b(?:{names})\b", short) for names, short in DTYPES.items()),
    (rf"\b(?:{NAMESPACES})::", ""),
    (r"\bunsigned (?=char|int|long|short)", "u"),
    # A kernel that is no template, as those that TE compiles at run time, has its data types in its parameters.
    (r"^([\w:]+)\(([^()]*)\)$", _with_dtypes),
    # A lambda becomes {number:parameters}, which has no parentheses; then parameter lists go, innermost first.
    (r"::operator\(\)\([^()]*\)(?: const)?", ""),
    (r"\{lambda\(([^(){}]*)\)#(\d+)\}", r"{\2:\1}"),
    (r"\([^()]*\(\*\)\([^()]*\)\)(?=\d)", ""),  # the type of a null pointer to a function
    (r"(?<=[\w>}])\([^()]*\)", ""),
    (r"&\((?:[\w:]+ )?([\w:]+)(?:<[^<>()]*>)?\)", r"\1"),  # a pointer to a function
    (r"(?<=[<, ])&(?=\w)", ""),
    (r"(?<=[<, ])\([\w:]+\)(?=\d)", ""),  # the type of a constant
    # PyTorch's functors. In `gelu::{2:}::{4:}::{1:bf16}` the first number is the branch (tanh or erf), the second
    # the data type once more, the last tells lambdas of one function apart (a square from a cube).
    (r"(\{\d+:\})(?:::\{\d+:\})+", r"\1"),
    (r"::\{1:\}|(?<=>)::\{1:[^{}]*\}", ""),
    (r"::\{(\d+):\}", r"#\1"),
    (r"::\{1:([^{}]+)\}", r"<\1>"),
    (r"::\{(\d+):([^{}]+)\}", r"#\1<\2>"),
    # Template arguments that say nothing, or the same again.
    (r", ?(?:array<char\*|TrivialOffsetCalculator<|Kernel_traits_base<|Flash_kernel_traits<)[^<>]*>", ""),
    (r"(?<=[<, ])Empty, ?", ""),
    (r"\b(?:Flash_[fb]wd_k|K)ernel_traits<", "traits<"),
    (r"(?<=[<, ])(\d+)u?l?(?<=[ul])(?=[,> ])", r"\1"),
    (r"(?<=[<, ])true(?=[,> ])", "1"),
    (r"(?<=[<, ])false(?=[,> ])", "0"),
    (r", ", ","),
    (r" >", ">"),
)


@dataclass(frozen=True)
class KernelUse:
    """One kernel, copy or memset: by short name, how often it ran, and for how many seconds in all."""

    name: str
    category: str
    count: int
    device_s: float


@lru_cache(maxsize=4096)  # a trace has the same names over and over, and each is asked for both its category and itself
def _plain(name: str) -> str:
    """The name without return type, parameters and namespaces, with short names of data types."""
    before = None
    while name != before:
        before = name
        for pattern, replacement in PLAIN:
            while (shorter := re.sub(pattern, replacement, name)) != name:
                name = shorter
    return name


def categorize(name: str) -> str:
    """The category of a kernel by its full name, or `other`."""
    plain = _plain(name)
    return next((category for category, pattern in RULES if re.search(pattern, plain)), "other")


def shorten(name: str) -> str:
    """The name in at most 100 characters: what it computes, on which data types and tiles.

    Kernels that do different things keep different names: one that is still too long ends in `~` and a digest of the
    rest. The short name depends on nothing but the name, and a short name stays as it is.
    """
    before = None
    while name != before:
        before, name = name, _plain(name)
        if len(name) > LONGEST_NAME:
            digest = hashlib.sha256(name.encode("utf8", "replace")).hexdigest()[:8]
            name = f"{name[: LONGEST_NAME - len(digest) - 1]}~{digest}"
    return name or "?"


def summarize(launches: Iterable[tuple[str, float]]) -> list[KernelUse]:
    """Each kernel once, by short name and category, the longest in total first and ties by name.

    `launches` are the full name and the seconds of every kernel, copy and memset of a profiled pass.
    """
    by_full_name: dict[str, list[float]] = defaultdict(list)
    for full_name, device_s in launches:
        by_full_name[full_name].append(device_s)
    by_use: dict[tuple[str, str], list[float]] = defaultdict(list)
    for full_name, durations in by_full_name.items():
        by_use[shorten(full_name), categorize(full_name)] += durations
    uses = [KernelUse(*use, len(durations), math.fsum(durations)) for use, durations in by_use.items()]
    return sorted(uses, key=lambda use: (-use.device_s, use.name, use.category))


def category_seconds(uses: Iterable[KernelUse]) -> dict[str, float]:
    """Seconds by category, in the order of CATEGORIES; only those that occur."""
    found: dict[str, list[float]] = defaultdict(list)
    for use in uses:
        found[use.category].append(use.device_s)
    return {category: math.fsum(found[category]) for category in CATEGORIES if category in found}


def launches(uses: Iterable[KernelUse]) -> int:
    """How many kernels, copies and memsets ran."""
    return sum(use.count for use in uses)
