"""The cases' ids are frozen, since stored files name cases by them; and each reason why a case cannot run."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from shapes.cases import GemmCase, LayerCase, support
from shapes.gemms import Linear, LinearGroup
from shapes.models import MODELS
from shapes.recipes import RECIPES
from shapes.selection import Selection, select
from shapes.stages import STAGES

# Not derived from anything: who changes an id makes the case NEW and its baseline MISSING, and shall see it here.
TINY_LAYER_IDS = """\
layer/tiny/torch/bf16/eager/sustained/forward
layer/tiny/torch/bf16/eager/sustained/backward
layer/tiny/torch/bf16/eager/sustained/forward_backward
layer/tiny/torch/fp8_delayed_scaling/eager/sustained/forward
layer/tiny/torch/fp8_delayed_scaling/eager/sustained/backward
layer/tiny/torch/fp8_delayed_scaling/eager/sustained/forward_backward
layer/tiny/torch/fp8_current_scaling/eager/sustained/forward
layer/tiny/torch/fp8_current_scaling/eager/sustained/backward
layer/tiny/torch/fp8_current_scaling/eager/sustained/forward_backward
layer/tiny/torch/fp8_block_scaling/eager/sustained/forward
layer/tiny/torch/fp8_block_scaling/eager/sustained/backward
layer/tiny/torch/fp8_block_scaling/eager/sustained/forward_backward
layer/tiny/torch/mxfp8/eager/sustained/forward
layer/tiny/torch/mxfp8/eager/sustained/backward
layer/tiny/torch/mxfp8/eager/sustained/forward_backward
layer/tiny/torch/nvfp4/eager/sustained/forward
layer/tiny/torch/nvfp4/eager/sustained/backward
layer/tiny/torch/nvfp4/eager/sustained/forward_backward
layer/tiny/torch_sdpa/bf16/eager/sustained/forward
layer/tiny/torch_sdpa/bf16/eager/sustained/backward
layer/tiny/torch_sdpa/bf16/eager/sustained/forward_backward
layer/tiny/torch_sdpa/fp8_delayed_scaling/eager/sustained/forward
layer/tiny/torch_sdpa/fp8_delayed_scaling/eager/sustained/backward
layer/tiny/torch_sdpa/fp8_delayed_scaling/eager/sustained/forward_backward
layer/tiny/torch_sdpa/fp8_current_scaling/eager/sustained/forward
layer/tiny/torch_sdpa/fp8_current_scaling/eager/sustained/backward
layer/tiny/torch_sdpa/fp8_current_scaling/eager/sustained/forward_backward
layer/tiny/torch_sdpa/fp8_block_scaling/eager/sustained/forward
layer/tiny/torch_sdpa/fp8_block_scaling/eager/sustained/backward
layer/tiny/torch_sdpa/fp8_block_scaling/eager/sustained/forward_backward
layer/tiny/torch_sdpa/mxfp8/eager/sustained/forward
layer/tiny/torch_sdpa/mxfp8/eager/sustained/backward
layer/tiny/torch_sdpa/mxfp8/eager/sustained/forward_backward
layer/tiny/torch_sdpa/nvfp4/eager/sustained/forward
layer/tiny/torch_sdpa/nvfp4/eager/sustained/backward
layer/tiny/torch_sdpa/nvfp4/eager/sustained/forward_backward
layer/tiny/te_modules/bf16/eager/sustained/forward
layer/tiny/te_modules/bf16/eager/sustained/backward
layer/tiny/te_modules/bf16/eager/sustained/forward_backward
layer/tiny/te_modules/fp8_delayed_scaling/eager/sustained/forward
layer/tiny/te_modules/fp8_delayed_scaling/eager/sustained/backward
layer/tiny/te_modules/fp8_delayed_scaling/eager/sustained/forward_backward
layer/tiny/te_modules/fp8_current_scaling/eager/sustained/forward
layer/tiny/te_modules/fp8_current_scaling/eager/sustained/backward
layer/tiny/te_modules/fp8_current_scaling/eager/sustained/forward_backward
layer/tiny/te_modules/fp8_block_scaling/eager/sustained/forward
layer/tiny/te_modules/fp8_block_scaling/eager/sustained/backward
layer/tiny/te_modules/fp8_block_scaling/eager/sustained/forward_backward
layer/tiny/te_modules/mxfp8/eager/sustained/forward
layer/tiny/te_modules/mxfp8/eager/sustained/backward
layer/tiny/te_modules/mxfp8/eager/sustained/forward_backward
layer/tiny/te_modules/nvfp4/eager/sustained/forward
layer/tiny/te_modules/nvfp4/eager/sustained/backward
layer/tiny/te_modules/nvfp4/eager/sustained/forward_backward
layer/tiny/te_attention/bf16/eager/sustained/forward
layer/tiny/te_attention/bf16/eager/sustained/backward
layer/tiny/te_attention/bf16/eager/sustained/forward_backward
layer/tiny/te_attention/fp8_delayed_scaling/eager/sustained/forward
layer/tiny/te_attention/fp8_delayed_scaling/eager/sustained/backward
layer/tiny/te_attention/fp8_delayed_scaling/eager/sustained/forward_backward
layer/tiny/te_attention/fp8_current_scaling/eager/sustained/forward
layer/tiny/te_attention/fp8_current_scaling/eager/sustained/backward
layer/tiny/te_attention/fp8_current_scaling/eager/sustained/forward_backward
layer/tiny/te_attention/fp8_block_scaling/eager/sustained/forward
layer/tiny/te_attention/fp8_block_scaling/eager/sustained/backward
layer/tiny/te_attention/fp8_block_scaling/eager/sustained/forward_backward
layer/tiny/te_attention/mxfp8/eager/sustained/forward
layer/tiny/te_attention/mxfp8/eager/sustained/backward
layer/tiny/te_attention/mxfp8/eager/sustained/forward_backward
layer/tiny/te_attention/nvfp4/eager/sustained/forward
layer/tiny/te_attention/nvfp4/eager/sustained/backward
layer/tiny/te_attention/nvfp4/eager/sustained/forward_backward
layer/tiny/te_fused/bf16/eager/sustained/forward
layer/tiny/te_fused/bf16/eager/sustained/backward
layer/tiny/te_fused/bf16/eager/sustained/forward_backward
layer/tiny/te_fused/fp8_delayed_scaling/eager/sustained/forward
layer/tiny/te_fused/fp8_delayed_scaling/eager/sustained/backward
layer/tiny/te_fused/fp8_delayed_scaling/eager/sustained/forward_backward
layer/tiny/te_fused/fp8_current_scaling/eager/sustained/forward
layer/tiny/te_fused/fp8_current_scaling/eager/sustained/backward
layer/tiny/te_fused/fp8_current_scaling/eager/sustained/forward_backward
layer/tiny/te_fused/fp8_block_scaling/eager/sustained/forward
layer/tiny/te_fused/fp8_block_scaling/eager/sustained/backward
layer/tiny/te_fused/fp8_block_scaling/eager/sustained/forward_backward
layer/tiny/te_fused/mxfp8/eager/sustained/forward
layer/tiny/te_fused/mxfp8/eager/sustained/backward
layer/tiny/te_fused/mxfp8/eager/sustained/forward_backward
layer/tiny/te_fused/nvfp4/eager/sustained/forward
layer/tiny/te_fused/nvfp4/eager/sustained/backward
layer/tiny/te_fused/nvfp4/eager/sustained/forward_backward
layer/tiny/te_layer/bf16/eager/sustained/forward
layer/tiny/te_layer/bf16/eager/sustained/backward
layer/tiny/te_layer/bf16/eager/sustained/forward_backward
layer/tiny/te_layer/fp8_delayed_scaling/eager/sustained/forward
layer/tiny/te_layer/fp8_delayed_scaling/eager/sustained/backward
layer/tiny/te_layer/fp8_delayed_scaling/eager/sustained/forward_backward
layer/tiny/te_layer/fp8_current_scaling/eager/sustained/forward
layer/tiny/te_layer/fp8_current_scaling/eager/sustained/backward
layer/tiny/te_layer/fp8_current_scaling/eager/sustained/forward_backward
layer/tiny/te_layer/fp8_block_scaling/eager/sustained/forward
layer/tiny/te_layer/fp8_block_scaling/eager/sustained/backward
layer/tiny/te_layer/fp8_block_scaling/eager/sustained/forward_backward
layer/tiny/te_layer/mxfp8/eager/sustained/forward
layer/tiny/te_layer/mxfp8/eager/sustained/backward
layer/tiny/te_layer/mxfp8/eager/sustained/forward_backward
layer/tiny/te_layer/nvfp4/eager/sustained/forward
layer/tiny/te_layer/nvfp4/eager/sustained/backward
layer/tiny/te_layer/nvfp4/eager/sustained/forward_backward
""".splitlines()

TINY_GEMM_IDS = """\
gemm/tiny/bf16/in_layer/autocast/fprop/qkv
gemm/tiny/bf16/in_layer/autocast/fprop/attn_out
gemm/tiny/bf16/in_layer/autocast/fprop/mlp_up
gemm/tiny/bf16/in_layer/autocast/fprop/mlp_down
gemm/tiny/bf16/in_layer/autocast/dgrad/qkv
gemm/tiny/bf16/in_layer/autocast/dgrad/attn_out
gemm/tiny/bf16/in_layer/autocast/dgrad/mlp_up
gemm/tiny/bf16/in_layer/autocast/dgrad/mlp_down
gemm/tiny/bf16/in_layer/autocast/wgrad/qkv
gemm/tiny/bf16/in_layer/autocast/wgrad/attn_out
gemm/tiny/bf16/in_layer/autocast/wgrad/mlp_up
gemm/tiny/bf16/in_layer/autocast/wgrad/mlp_down
gemm/tiny/fp8_delayed_scaling/in_layer/autocast/fprop/qkv
gemm/tiny/fp8_delayed_scaling/in_layer/autocast/fprop/attn_out
gemm/tiny/fp8_delayed_scaling/in_layer/autocast/fprop/mlp_up
gemm/tiny/fp8_delayed_scaling/in_layer/autocast/fprop/mlp_down
gemm/tiny/fp8_delayed_scaling/in_layer/autocast/dgrad/qkv
gemm/tiny/fp8_delayed_scaling/in_layer/autocast/dgrad/attn_out
gemm/tiny/fp8_delayed_scaling/in_layer/autocast/dgrad/mlp_up
gemm/tiny/fp8_delayed_scaling/in_layer/autocast/dgrad/mlp_down
gemm/tiny/fp8_delayed_scaling/in_layer/autocast/wgrad/qkv
gemm/tiny/fp8_delayed_scaling/in_layer/autocast/wgrad/attn_out
gemm/tiny/fp8_delayed_scaling/in_layer/autocast/wgrad/mlp_up
gemm/tiny/fp8_delayed_scaling/in_layer/autocast/wgrad/mlp_down
gemm/tiny/fp8_delayed_scaling/in_layer/prequantized/fprop/qkv
gemm/tiny/fp8_delayed_scaling/in_layer/prequantized/fprop/attn_out
gemm/tiny/fp8_delayed_scaling/in_layer/prequantized/fprop/mlp_up
gemm/tiny/fp8_delayed_scaling/in_layer/prequantized/fprop/mlp_down
gemm/tiny/fp8_delayed_scaling/in_layer/prequantized/dgrad/qkv
gemm/tiny/fp8_delayed_scaling/in_layer/prequantized/dgrad/attn_out
gemm/tiny/fp8_delayed_scaling/in_layer/prequantized/dgrad/mlp_up
gemm/tiny/fp8_delayed_scaling/in_layer/prequantized/dgrad/mlp_down
gemm/tiny/fp8_delayed_scaling/in_layer/prequantized/wgrad/qkv
gemm/tiny/fp8_delayed_scaling/in_layer/prequantized/wgrad/attn_out
gemm/tiny/fp8_delayed_scaling/in_layer/prequantized/wgrad/mlp_up
gemm/tiny/fp8_delayed_scaling/in_layer/prequantized/wgrad/mlp_down
gemm/tiny/fp8_delayed_scaling/in_layer/quantization/fprop/qkv
gemm/tiny/fp8_delayed_scaling/in_layer/quantization/fprop/attn_out
gemm/tiny/fp8_delayed_scaling/in_layer/quantization/fprop/mlp_up
gemm/tiny/fp8_delayed_scaling/in_layer/quantization/fprop/mlp_down
gemm/tiny/fp8_delayed_scaling/in_layer/quantization/dgrad/qkv
gemm/tiny/fp8_delayed_scaling/in_layer/quantization/dgrad/attn_out
gemm/tiny/fp8_delayed_scaling/in_layer/quantization/dgrad/mlp_up
gemm/tiny/fp8_delayed_scaling/in_layer/quantization/dgrad/mlp_down
gemm/tiny/fp8_current_scaling/in_layer/autocast/fprop/qkv
gemm/tiny/fp8_current_scaling/in_layer/autocast/fprop/attn_out
gemm/tiny/fp8_current_scaling/in_layer/autocast/fprop/mlp_up
gemm/tiny/fp8_current_scaling/in_layer/autocast/fprop/mlp_down
gemm/tiny/fp8_current_scaling/in_layer/autocast/dgrad/qkv
gemm/tiny/fp8_current_scaling/in_layer/autocast/dgrad/attn_out
gemm/tiny/fp8_current_scaling/in_layer/autocast/dgrad/mlp_up
gemm/tiny/fp8_current_scaling/in_layer/autocast/dgrad/mlp_down
gemm/tiny/fp8_current_scaling/in_layer/autocast/wgrad/qkv
gemm/tiny/fp8_current_scaling/in_layer/autocast/wgrad/attn_out
gemm/tiny/fp8_current_scaling/in_layer/autocast/wgrad/mlp_up
gemm/tiny/fp8_current_scaling/in_layer/autocast/wgrad/mlp_down
gemm/tiny/fp8_current_scaling/in_layer/prequantized/fprop/qkv
gemm/tiny/fp8_current_scaling/in_layer/prequantized/fprop/attn_out
gemm/tiny/fp8_current_scaling/in_layer/prequantized/fprop/mlp_up
gemm/tiny/fp8_current_scaling/in_layer/prequantized/fprop/mlp_down
gemm/tiny/fp8_current_scaling/in_layer/prequantized/dgrad/qkv
gemm/tiny/fp8_current_scaling/in_layer/prequantized/dgrad/attn_out
gemm/tiny/fp8_current_scaling/in_layer/prequantized/dgrad/mlp_up
gemm/tiny/fp8_current_scaling/in_layer/prequantized/dgrad/mlp_down
gemm/tiny/fp8_current_scaling/in_layer/prequantized/wgrad/qkv
gemm/tiny/fp8_current_scaling/in_layer/prequantized/wgrad/attn_out
gemm/tiny/fp8_current_scaling/in_layer/prequantized/wgrad/mlp_up
gemm/tiny/fp8_current_scaling/in_layer/prequantized/wgrad/mlp_down
gemm/tiny/fp8_current_scaling/in_layer/quantization/fprop/qkv
gemm/tiny/fp8_current_scaling/in_layer/quantization/fprop/attn_out
gemm/tiny/fp8_current_scaling/in_layer/quantization/fprop/mlp_up
gemm/tiny/fp8_current_scaling/in_layer/quantization/fprop/mlp_down
gemm/tiny/fp8_current_scaling/in_layer/quantization/dgrad/qkv
gemm/tiny/fp8_current_scaling/in_layer/quantization/dgrad/attn_out
gemm/tiny/fp8_current_scaling/in_layer/quantization/dgrad/mlp_up
gemm/tiny/fp8_current_scaling/in_layer/quantization/dgrad/mlp_down
gemm/tiny/fp8_block_scaling/in_layer/autocast/fprop/qkv
gemm/tiny/fp8_block_scaling/in_layer/autocast/fprop/attn_out
gemm/tiny/fp8_block_scaling/in_layer/autocast/fprop/mlp_up
gemm/tiny/fp8_block_scaling/in_layer/autocast/fprop/mlp_down
gemm/tiny/fp8_block_scaling/in_layer/autocast/dgrad/qkv
gemm/tiny/fp8_block_scaling/in_layer/autocast/dgrad/attn_out
gemm/tiny/fp8_block_scaling/in_layer/autocast/dgrad/mlp_up
gemm/tiny/fp8_block_scaling/in_layer/autocast/dgrad/mlp_down
gemm/tiny/fp8_block_scaling/in_layer/autocast/wgrad/qkv
gemm/tiny/fp8_block_scaling/in_layer/autocast/wgrad/attn_out
gemm/tiny/fp8_block_scaling/in_layer/autocast/wgrad/mlp_up
gemm/tiny/fp8_block_scaling/in_layer/autocast/wgrad/mlp_down
gemm/tiny/fp8_block_scaling/in_layer/prequantized/fprop/qkv
gemm/tiny/fp8_block_scaling/in_layer/prequantized/fprop/attn_out
gemm/tiny/fp8_block_scaling/in_layer/prequantized/fprop/mlp_up
gemm/tiny/fp8_block_scaling/in_layer/prequantized/fprop/mlp_down
gemm/tiny/fp8_block_scaling/in_layer/prequantized/dgrad/qkv
gemm/tiny/fp8_block_scaling/in_layer/prequantized/dgrad/attn_out
gemm/tiny/fp8_block_scaling/in_layer/prequantized/dgrad/mlp_up
gemm/tiny/fp8_block_scaling/in_layer/prequantized/dgrad/mlp_down
gemm/tiny/fp8_block_scaling/in_layer/prequantized/wgrad/qkv
gemm/tiny/fp8_block_scaling/in_layer/prequantized/wgrad/attn_out
gemm/tiny/fp8_block_scaling/in_layer/prequantized/wgrad/mlp_up
gemm/tiny/fp8_block_scaling/in_layer/prequantized/wgrad/mlp_down
gemm/tiny/fp8_block_scaling/in_layer/quantization/fprop/qkv
gemm/tiny/fp8_block_scaling/in_layer/quantization/fprop/attn_out
gemm/tiny/fp8_block_scaling/in_layer/quantization/fprop/mlp_up
gemm/tiny/fp8_block_scaling/in_layer/quantization/fprop/mlp_down
gemm/tiny/fp8_block_scaling/in_layer/quantization/dgrad/qkv
gemm/tiny/fp8_block_scaling/in_layer/quantization/dgrad/attn_out
gemm/tiny/fp8_block_scaling/in_layer/quantization/dgrad/mlp_up
gemm/tiny/fp8_block_scaling/in_layer/quantization/dgrad/mlp_down
gemm/tiny/mxfp8/in_layer/autocast/fprop/qkv
gemm/tiny/mxfp8/in_layer/autocast/fprop/attn_out
gemm/tiny/mxfp8/in_layer/autocast/fprop/mlp_up
gemm/tiny/mxfp8/in_layer/autocast/fprop/mlp_down
gemm/tiny/mxfp8/in_layer/autocast/dgrad/qkv
gemm/tiny/mxfp8/in_layer/autocast/dgrad/attn_out
gemm/tiny/mxfp8/in_layer/autocast/dgrad/mlp_up
gemm/tiny/mxfp8/in_layer/autocast/dgrad/mlp_down
gemm/tiny/mxfp8/in_layer/autocast/wgrad/qkv
gemm/tiny/mxfp8/in_layer/autocast/wgrad/attn_out
gemm/tiny/mxfp8/in_layer/autocast/wgrad/mlp_up
gemm/tiny/mxfp8/in_layer/autocast/wgrad/mlp_down
gemm/tiny/mxfp8/in_layer/prequantized/fprop/qkv
gemm/tiny/mxfp8/in_layer/prequantized/fprop/attn_out
gemm/tiny/mxfp8/in_layer/prequantized/fprop/mlp_up
gemm/tiny/mxfp8/in_layer/prequantized/fprop/mlp_down
gemm/tiny/mxfp8/in_layer/prequantized/dgrad/qkv
gemm/tiny/mxfp8/in_layer/prequantized/dgrad/attn_out
gemm/tiny/mxfp8/in_layer/prequantized/dgrad/mlp_up
gemm/tiny/mxfp8/in_layer/prequantized/dgrad/mlp_down
gemm/tiny/mxfp8/in_layer/prequantized/wgrad/qkv
gemm/tiny/mxfp8/in_layer/prequantized/wgrad/attn_out
gemm/tiny/mxfp8/in_layer/prequantized/wgrad/mlp_up
gemm/tiny/mxfp8/in_layer/prequantized/wgrad/mlp_down
gemm/tiny/mxfp8/in_layer/quantization/fprop/qkv
gemm/tiny/mxfp8/in_layer/quantization/fprop/attn_out
gemm/tiny/mxfp8/in_layer/quantization/fprop/mlp_up
gemm/tiny/mxfp8/in_layer/quantization/fprop/mlp_down
gemm/tiny/mxfp8/in_layer/quantization/dgrad/qkv
gemm/tiny/mxfp8/in_layer/quantization/dgrad/attn_out
gemm/tiny/mxfp8/in_layer/quantization/dgrad/mlp_up
gemm/tiny/mxfp8/in_layer/quantization/dgrad/mlp_down
gemm/tiny/nvfp4/in_layer/autocast/fprop/qkv
gemm/tiny/nvfp4/in_layer/autocast/fprop/attn_out
gemm/tiny/nvfp4/in_layer/autocast/fprop/mlp_up
gemm/tiny/nvfp4/in_layer/autocast/fprop/mlp_down
gemm/tiny/nvfp4/in_layer/autocast/dgrad/qkv
gemm/tiny/nvfp4/in_layer/autocast/dgrad/attn_out
gemm/tiny/nvfp4/in_layer/autocast/dgrad/mlp_up
gemm/tiny/nvfp4/in_layer/autocast/dgrad/mlp_down
gemm/tiny/nvfp4/in_layer/autocast/wgrad/qkv
gemm/tiny/nvfp4/in_layer/autocast/wgrad/attn_out
gemm/tiny/nvfp4/in_layer/autocast/wgrad/mlp_up
gemm/tiny/nvfp4/in_layer/autocast/wgrad/mlp_down
gemm/tiny/nvfp4/in_layer/prequantized/fprop/qkv
gemm/tiny/nvfp4/in_layer/prequantized/fprop/attn_out
gemm/tiny/nvfp4/in_layer/prequantized/fprop/mlp_up
gemm/tiny/nvfp4/in_layer/prequantized/fprop/mlp_down
gemm/tiny/nvfp4/in_layer/prequantized/dgrad/qkv
gemm/tiny/nvfp4/in_layer/prequantized/dgrad/attn_out
gemm/tiny/nvfp4/in_layer/prequantized/dgrad/mlp_up
gemm/tiny/nvfp4/in_layer/prequantized/dgrad/mlp_down
gemm/tiny/nvfp4/in_layer/prequantized/wgrad/qkv
gemm/tiny/nvfp4/in_layer/prequantized/wgrad/attn_out
gemm/tiny/nvfp4/in_layer/prequantized/wgrad/mlp_up
gemm/tiny/nvfp4/in_layer/prequantized/wgrad/mlp_down
gemm/tiny/nvfp4/in_layer/quantization/fprop/qkv
gemm/tiny/nvfp4/in_layer/quantization/fprop/attn_out
gemm/tiny/nvfp4/in_layer/quantization/fprop/mlp_up
gemm/tiny/nvfp4/in_layer/quantization/fprop/mlp_down
gemm/tiny/nvfp4/in_layer/quantization/dgrad/qkv
gemm/tiny/nvfp4/in_layer/quantization/dgrad/attn_out
gemm/tiny/nvfp4/in_layer/quantization/dgrad/mlp_up
gemm/tiny/nvfp4/in_layer/quantization/dgrad/mlp_down
""".splitlines()


def ids(selection: Selection) -> list[str]:
    """All cases' ids, in the order in which they run."""
    return [case.id for case in (*selection.layer_cases(), *selection.gemm_cases())]


class TestIds:
    """What a case is called."""

    def test_layers_of_the_tiny_model_on_the_cpu(self) -> None:
        """6 stages x 6 recipes x 3 passes, in the one regime of a CPU, in this order."""
        assert [case.id for case in select("cpu", ["tiny"]).layer_cases()] == TINY_LAYER_IDS
        assert len(TINY_LAYER_IDS) == 6 * 6 * 3

    def test_gemms_of_the_tiny_model_on_the_cpu(self) -> None:
        """4 linears x 3 passes: bf16 in one mode, 5 recipes in two, and what these quantize in 2 of 3 passes."""
        assert [case.id for case in select("cpu", ["tiny"]).gemm_cases()] == TINY_GEMM_IDS
        assert len(TINY_GEMM_IDS) == 4 * (3 * (1 + 5 * 2) + 2 * 5)

    @pytest.mark.parametrize("model", MODELS)
    def test_each_model_has_as_many_cases_on_a_gpu(self, model: str) -> None:
        """Two regimes. PyTorch's stages run bf16 only, bf16's GEMMs have one mode, and wgrads quantize nothing."""
        selection = select("cuda", [model])
        assert len(selection.layer_cases()) == 2 * 3 * (2 * 1 + 4 * 6)
        assert len(selection.gemm_cases()) == 2 * (12 * (1 + 5 * 2) + 8 * 5)

    def test_shapes_have_three_gemms_each(self) -> None:
        """Named by the shape as it was given."""
        assert [case.id for case in select("cpu", shapes="128x256x512", recipes=["bf16"]).gemm_cases()] == [
            "gemm/shapes/bf16/in_layer/autocast/fprop/128x256x512",
            "gemm/shapes/bf16/in_layer/autocast/dgrad/128x256x512",
            "gemm/shapes/bf16/in_layer/autocast/wgrad/128x256x512",
        ]

    @pytest.mark.parametrize("device", ["cuda", "cpu"])
    def test_they_are_unique(self, device: str) -> None:
        """Over all models, stages and recipes, with shapes and changed models beside them."""
        selections = [
            select(device, list(MODELS), recipes=list(RECIPES), shapes="128x256x512,8x16x32"),
            select(device, list(MODELS), {"sequence_length": 96}, recipes=list(RECIPES)),
            select(device, hyperparameters={"hidden_size": 64, "num_attention_heads": 4}),
        ]
        found = [name for selection in selections for name in ids(selection)]
        assert len(set(found)) == len(found)

    @pytest.mark.parametrize("device", ["cuda", "cpu"])
    def test_the_order_of_options_changes_neither_ids_nor_their_order(self, device: str) -> None:
        """Models, stages, recipes and repeated names in any order are the same run."""
        models, stages, recipes = ["tiny", "gpt2_medium"], list(STAGES), list(RECIPES)
        expected = ids(select(device, models, stages=stages, recipes=recipes))
        for names in (models, stages, recipes):
            names.append(names[0])
            random.Random(1).shuffle(names)
        assert ids(select(device, models, stages=stages, recipes=recipes)) == expected

    @pytest.mark.parametrize("device", ["cuda", "cpu"])
    def test_cases_that_share_a_layer_or_operands_run_next_to_each_other(self, device: str) -> None:
        """No layer and no group of GEMMs is come back to after another one."""
        selection = select(device, ["tiny", "gpt2_medium"], shapes="128x256x512")
        layers = [(case.model, case.stage, case.recipe) for case in selection.layer_cases()]
        gemms = [(case.model, case.recipe) for case in selection.gemm_cases()]
        for shared in (layers, gemms):
            changes = sum(one != other for one, other in itertools.pairwise(shared))
            assert changes == len(set(shared)) - 1

    def test_an_id_takes_its_case_apart(self) -> None:
        """Kind and axes, separated by slashes that no value contains."""
        for name in TINY_LAYER_IDS:
            kind, *values = name.split("/")
            assert (kind, LayerCase(*values).id) == ("layer", name)
        for name in TINY_GEMM_IDS:
            kind, *values = name.split("/")
            assert (kind, GemmCase(*values).id) == ("gemm", name)

    def test_pre_quantizing_leaves_bf16_as_it_is(self) -> None:
        """What has no quantization is measured all the same, so that there is something to compare with."""
        cases = select("cpu", ["tiny"], recipes=["bf16", "mxfp8"], modes=["prequantized"]).gemm_cases()
        assert {(case.recipe, case.mode) for case in cases} == {("bf16", "autocast"), ("mxfp8", "prequantized")}


ALIGNED = LinearGroup("aligned", (Linear("up", 128, 256, 512), Linear("down", 128, 512, 256)))
MISALIGNED = LinearGroup("misaligned", (Linear("up", 128, 256, 512), Linear("down", 128, 100, 256)))


def refuses(recipe: str) -> str | None:
    """A Transformer Engine that cannot run MXFP8 here."""
    return "needs compute capability 10.0" if recipe == "mxfp8" else None


def must_not_ask(recipe: str) -> str | None:
    """A Transformer Engine that nobody may ask."""
    raise AssertionError(f"Transformer Engine was asked about {recipe}")


class TestSupport:
    """Why a case cannot run."""

    @pytest.mark.parametrize("recipe", ["fp8_delayed_scaling", "fp8_current_scaling", "fp8_block_scaling"])
    @pytest.mark.parametrize(
        ("sizes", "reason"),
        [
            ((8, 32, 32), "needs tokens to be a multiple of 16 in the backward pass, got 8"),
            ((16, 32, 24), "needs out_features to be a multiple of 16 in the backward pass, got 24"),
            ((16, 32, 20), "needs out_features to be a multiple of 8 in the forward pass, got 20"),
            ((16, 24, 32), "needs in_features to be a multiple of 16 in the forward pass, got 24"),
        ],
    )
    def test_what_passes_forward_can_fail_backward(self, recipe: str, sizes: tuple[int, int, int], reason: str) -> None:
        """TE's modules ask for less than the products of the backward pass need."""
        assert RECIPES[recipe].misaligned(*sizes) == f"{recipe} {reason}"

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            pytest.param(
                {"recipe": "bf16", "device": "cpu", "stage": "te_layer", "te_reason": must_not_ask},
                "stage te_layer needs Transformer Engine and a GPU; this run is on the CPU",
                id="a stage of TE on the CPU",
            ),
            pytest.param(
                {"recipe": "mxfp8", "device": "cuda", "stage": "te_layer", "te_reason": refuses},
                "mxfp8: needs compute capability 10.0",
                id="a layer in a recipe that TE refuses, in its words",
            ),
            pytest.param(
                {"recipe": "mxfp8", "device": "cuda", "te_reason": refuses},
                "mxfp8: needs compute capability 10.0",
                id="GEMMs in a recipe that TE refuses, in its words",
            ),
            pytest.param(
                {"recipe": "fp8_current_scaling", "device": "cuda", "stage": "torch_sdpa", "te_reason": must_not_ask},
                "on a GPU fp8_current_scaling needs a stage of Transformer Engine;"
                " PyTorch's stages emulate it on the CPU only",
                id="an emulated recipe on a GPU",
            ),
            pytest.param(
                {"recipe": "mxfp8", "device": "cpu", "group": MISALIGNED},
                "linear down: mxfp8 needs in_features to be a multiple of 32 in the forward pass, got 100",
                id="a misaligned linear on the CPU",
            ),
            pytest.param(
                {"recipe": "nvfp4", "device": "cuda", "stage": "te_fused", "group": MISALIGNED, "te_reason": refuses},
                "linear down: nvfp4 needs in_features to be a multiple of 16 in the forward pass, got 100",
                id="a misaligned linear on a GPU",
            ),
        ],
    )
    def test_each_reason_says_what_is_in_the_way(self, arguments: dict[str, Any], reason: str) -> None:
        """In one line, with the names and numbers of the case."""
        assert support(**{"group": ALIGNED} | arguments) == reason

    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("stage", [None, "torch", "torch_sdpa"])
    def test_every_recipe_runs_on_the_cpu_without_transformer_engine(self, recipe: str, stage: str | None) -> None:
        """Layers in PyTorch's stages, and GEMMs alone; nobody asks TE."""
        assert support(recipe, ALIGNED, "cpu", stage, must_not_ask) is None

    @pytest.mark.parametrize("stage", [None, *(name for name, stage in STAGES.items() if stage.backend == "te")])
    def test_what_transformer_engine_accepts_runs_on_a_gpu(self, stage: str | None) -> None:
        """Layers in its stages, and GEMMs alone."""
        assert support("fp8_block_scaling", ALIGNED, "cuda", stage, refuses) is None

    def test_bf16_runs_in_pytorch_stages_on_a_gpu_without_asking(self) -> None:
        """It needs nothing of Transformer Engine, and has no alignment."""
        assert support("bf16", MISALIGNED, "cuda", "torch", must_not_ask) is None
