"""Names of kernels get the right category and a short name that still says what the kernel does."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benches.harness.kernels import (
    CATEGORIES,
    LONGEST_NAME,
    KernelUse,
    categorize,
    category_seconds,
    launches,
    shorten,
    summarize,
)

SEEN = 129  # names in the section of that name


def read_names() -> dict[str, list[tuple[str, str]]]:
    """(category, name) by section of the data file: `seen` on hardware, in TE's `library`, and `elsewhere`."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for line in (Path(__file__).parent / "data" / "kernels.tsv").read_text(encoding="utf8").splitlines():
        if line.startswith("# section: "):
            rows = sections[line.split()[2].rstrip(".")] = []
        elif not line.startswith("#"):
            category, name = line.split("\t")
            rows.append((category, name))
    return sections


SECTIONS = read_names()
NAMES = {name: category for rows in SECTIONS.values() for category, name in rows}


def only(*parts: str) -> str:
    """The one known name that contains all these parts."""
    (name,) = (name for name in NAMES if all(part in name for part in parts))
    return name


GELU = only("vectorized_elementwise_kernel", "GeluCUDAKernelImpl", "lambda(c10::BFloat16)")
POW = only("pow_tensor_scalar_kernel_impl")
CUBE = POW.replace("{lambda(float)#1}", "{lambda(float)#2}")
LN_FWD = ("ln_fwd_tuned_kernel", "1024u, 1u, 4u")
CAST = "cast_transpose_optimized_kernel(__nv_bfloat16"

# Pieces of names, for names that nobody has thought of.
PIECES = [
    *"{}()<>:,*&~? 0k",
    *("::", "#1", "#2", ", ", "128u", "64ul", "true", "false", "float", "Empty", "lambda", "operator()", "x" * 40),
    *("{lambda()#1}", "{lambda(int)#3}", "void ", " const", "unsigned int", "(anonymous namespace)::", "at::native::"),
    *(
        "c10::BFloat16",
        "__nv_fp8_e4m3",
        "std::array<char*",
        "Kernel_traits<",
        "pytorch_flash::",
        "gemm",
        "amax",
        "relu",
    ),
    *("cudnn_generated_fort_native_", "nvjet_sm90_qqtst_"),
]
texts = st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
durations = st.floats(min_value=0, max_value=10)
profiles = st.lists(st.tuples(st.sampled_from([*NAMES, "one_kernel", "another_kernel"]), durations), max_size=30)


class TestData:
    """The file that the other tests go by."""

    def test_it_has_every_category_and_no_other(self) -> None:
        """No layer on a Hopper GPU runs FP4, and none ran a GEMM of yet another format."""
        assert set(NAMES.values()) == set(CATEGORIES)
        assert {category for category, _ in SECTIONS["seen"]} == {*CATEGORIES} - {"gemm_fp4", "gemm_other"}

    def test_it_has_all_names_once(self) -> None:
        """In three sections."""
        assert SECTIONS.keys() == {"seen", "library", "elsewhere"}
        assert len(SECTIONS["seen"]) == SEEN
        assert len(NAMES) == sum(len(rows) for rows in SECTIONS.values())


class TestCategorize:
    """categorize"""

    def test_every_known_name_gets_its_category(self) -> None:
        """Those that are wrong are listed with what they got."""
        assert {shorten(name): categorize(name) for name, right in NAMES.items() if categorize(name) != right} == {}

    @pytest.mark.parametrize(
        "name", ["", "my_new_kernel", "void ns::fancy<float>(float*)", "transformer_engine::new()"]
    )
    def test_an_unknown_kernel_is_other(self, name: str) -> None:
        """A name that no rule knows is no error."""
        assert categorize(name) == "other"

    @pytest.mark.parametrize("parameter", ["cutlass::Params", "flash::Params", "te::gemm::amax*", "Memcpy", "silu"])
    def test_what_a_kernel_is_given_does_not_decide(self, parameter: str) -> None:
        """Names of types in the parameter list say nothing about what the kernel does."""
        assert categorize(f"void ns::fancy_kernel<float>({parameter}, int)") == "other"

    @given(texts)
    def test_any_text_has_a_category(self, text: str) -> None:
        """Whatever a profiler may give."""
        assert categorize(text) in CATEGORIES


class TestShorten:
    """shorten"""

    def test_no_two_known_names_share_a_short_one(self) -> None:
        """Neither within a category nor across: tiles, data types, functors and causal masks remain visible."""
        names = defaultdict(list)
        for name in NAMES:
            names[shorten(name)].append(name)
        assert [same for same in names.values() if len(same) > 1] == []

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            pytest.param(
                only(*LN_FWD, "e4m3"), only(*LN_FWD, "__nv_bfloat16, __nv_bfloat16, __nv_bfloat16"), id="cast"
            ),
            pytest.param(only(CAST, "e4m3"), only(CAST, "e5m2"), id="format among the parameters"),
            pytest.param(GELU, GELU.replace("GeluType)::{lambda()#1}", "GeluType)::{lambda()#2}"), id="tanh and erf"),
            pytest.param(POW, CUBE, id="square and cube"),
            pytest.param(POW, POW.replace("_kernel<4,", "_kernel<8,"), id="vector width"),
            pytest.param(GELU, GELU.replace("c10::BFloat16", "c10::Half"), id="data type"),
            pytest.param(
                "void flash::flash_fwd_kernel<true>(flash::Flash_fwd_params)",
                "void pytorch_flash::flash_fwd_kernel<true>(pytorch_flash::Flash_fwd_params)",
                id="two copies of FlashAttention",
            ),
            pytest.param(
                only("cutlass::device_kernel<cutlass::gemm", "cutlass::bfloat16_t"),
                only("cutlass::device_kernel<cutlass::gemm", "MMA_64x128x16_F32F16F16"),
                id="difference far behind the 100th character",
            ),
        ],
    )
    def test_kernels_that_do_different_things_keep_different_names(self, one: str, other: str) -> None:
        """Where all that differs is easily lost."""
        assert one != other
        assert shorten(one) != shorten(other)

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            pytest.param(GELU, GELU.replace("const::{lambda()#4}", "const::{lambda()#5}"), id="one more data type"),
            pytest.param(GELU, GELU.replace("at::TensorIteratorBase&, ", "int, "), id="other parameters"),
            pytest.param(only("ZeroAmaxKernel("), "transformer_engine::ZeroAmaxKernel(float*)", id="namespace"),
        ],
    )
    def test_what_says_nothing_about_the_kernel_makes_no_difference(self, one: str, other: str) -> None:
        """So that a new release of a library does not look like another kernel."""
        assert one != other
        assert shorten(one) == shorten(other)

    @pytest.mark.parametrize(
        ("name", "short"),
        [
            (GELU, "vectorized_elementwise_kernel<8,GeluCUDAKernelImpl<bf16>>"),
            (POW, "vectorized_elementwise_kernel<4,pow_tensor_scalar_kernel_impl<float,float>>"),
            (only(*LN_FWD, "e4m3"), "ln_fwd_tuned_kernel<traits<bf16,bf16,e4m3,float,uint,1024,1,4,1,16>>"),
            (only(CAST, "e5m2"), "cast_transpose_optimized_kernel<bf16,e5m2>"),
            (only("Memcpy DtoD"), "Memcpy DtoD (Device -> Device)"),
            (
                only("GeluCUDAKernelImpl", "lambda(c10::Half)"),
                "vectorized_elementwise_kernel<4,GeluCUDAKernelImpl#2<fp16>>",
            ),
            (CUBE, "vectorized_elementwise_kernel<4,pow_tensor_scalar_kernel_impl<float,float>#2<float>>"),
            (only("unary_kernel<16, true", "gelu", "__nv_fp8_e4m3>"), "unary_kernel<16,1,float,gelu,bf16,e4m3>"),
            (only("unary_kernel<16, true", "identity"), "unary_kernel<16,1,float,fp8::identity,bf16,e4m3>"),
            (only("cast_fp8_1D_kernel<false", ")0"), "fp8::quantize_1D_kernel::cast_fp8_1D_kernel<0,0,bf16,e4m3>"),
            (
                only("group_scaled_swiglu_mxfp8_kernel<"),
                "mxfp8::group_scaled_swiglu_kernel::group_scaled_swiglu_mxfp8_kernel<silu_approx_x2,bf16,e4m3,1,0>",
            ),
            ("", "?"),
        ],
    )
    def test_short_names_are_these(self, name: str, short: str) -> None:
        """What they look like."""
        assert shorten(name) == short

    @pytest.mark.parametrize(
        "functor",
        [
            "CUDAFunctor_add<",
            "MulFunctor<float>",
            "direct_copy_kernel_cuda",
            "sum_functor<",
            "FillFunctor<",
            "silu_kernel",
        ],
    )
    def test_the_functor_of_a_pytorch_kernel_remains_visible(self, functor: str) -> None:
        """It is what the kernel does."""
        names = [name for name in NAMES if functor in name]
        assert names
        assert [name for name in names if functor not in shorten(name)] == []

    def test_names_of_cublas_stay_as_they_are(self) -> None:
        """Every part of them means something."""
        names = [name for name in NAMES if name.startswith("nvjet_")]
        assert len(names) > 40
        assert [name for name in names if shorten(name) != name] == []

    def test_nothing_superfluous_is_left(self) -> None:
        """In names seen on hardware; none of them had to be cut."""
        noise = ("void ", "anonymous", "lambda", "operator", "at::native", "c10::", "__nv_", "transformer_engine", "~")
        short = [shorten(name) for _, name in SECTIONS["seen"]]
        assert [name for name in short for part in noise if part in name] == []

    def test_a_name_that_is_too_long_is_cut_and_marked(self) -> None:
        """At the limit it is not."""
        assert shorten("k" * LONGEST_NAME) == "k" * LONGEST_NAME
        cut = shorten("k" * (LONGEST_NAME + 1))
        assert len(cut) == LONGEST_NAME
        assert cut.startswith("k" * (LONGEST_NAME - 9) + "~")

    @given(texts)
    def test_any_text_gets_a_short_name_that_stays(self, text: str) -> None:
        """No longer than the limit, never empty, and shortening it again changes nothing."""
        short = shorten(text)
        assert 0 < len(short) <= LONGEST_NAME
        assert shorten(short) == short

    def test_known_names_get_short_names_that_stay(self) -> None:
        """The same for real ones."""
        short = [shorten(name) for name in NAMES]
        assert max(map(len, short)) <= LONGEST_NAME
        assert [shorten(name) for name in short] == short


class TestSummarize:
    """summarize, category_seconds and launches"""

    def test_nothing_ran(self) -> None:
        """An empty profile has an empty summary."""
        assert summarize([]) == []
        assert category_seconds([]) == {}
        assert launches([]) == 0

    def test_a_renamed_kernel_is_counted_as_other(self) -> None:
        """It is there with its name and its time."""
        uses = summarize([("void te::brand_new<float>(float*)", 2.0), ("Memset (Device)", 1.0)])
        assert uses == [
            KernelUse("te::brand_new<float>", "other", 1, 2.0),
            KernelUse("Memset (Device)", "memset", 1, 1.0),
        ]
        assert category_seconds(uses) == {"memset": 1.0, "other": 2.0}
        assert launches(uses) == 2

    def test_the_longest_in_total_comes_first_and_ties_go_by_name(self) -> None:
        """Often and short before once and long, if it is more."""
        uses = summarize([("b", 2.0), ("a", 2.0), ("often", 1.5), ("often", 1.5), ("rare", 2.5)])
        assert [(use.name, use.count) for use in uses] == [("often", 2), ("rare", 1), ("a", 1), ("b", 1)]

    def test_categories_come_in_their_order(self) -> None:
        """However long each took."""
        uses = summarize([(name, 1e-6 * index) for index, name in enumerate(NAMES)])
        assert tuple(category_seconds(uses)) == CATEGORIES

    @given(profiles)
    def test_nothing_is_lost(self, profile: list[tuple[str, float]]) -> None:
        """Launches and seconds in all, of each category and of each name are those of the profile."""
        uses = summarize(profile)
        assert launches(uses) == len(profile)
        assert math.fsum(use.device_s for use in uses) == pytest.approx(math.fsum(time_s for _, time_s in profile))
        assert Counter({use.name: use.count for use in uses}) == Counter(shorten(name) for name, _ in profile)
        expected_s: dict[str, float] = defaultdict(float)
        for name, time_s in profile:
            expected_s[NAMES.get(name, "other")] += time_s
        assert category_seconds(uses) == pytest.approx(expected_s)

    @given(profiles)
    def test_the_order_of_launches_does_not_matter(self, profile: list[tuple[str, float]]) -> None:
        """To the last bit: sums are exact."""
        assert summarize(sorted(profile)) == summarize(profile)
