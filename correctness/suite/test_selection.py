"""Names and numbers become a selection, or one line that says what is wrong and what is known."""

from __future__ import annotations

import re
from typing import Any

import pytest

from shapes.cases import MODES
from shapes.models import HYPERPARAMETERS, MODELS
from shapes.recipes import RECIPES
from shapes.selection import select
from shapes.stages import STAGES

DEFAULT_RECIPES = (
    "bf16",
    "fp8_delayed_scaling",
    "fp8_current_scaling",
    "fp8_block_scaling",
    "mxfp8",
    "nvfp4",
)


def names(*arguments: Any, **options: Any) -> list[str]:
    """Names of the selected models."""
    return [model.name for model in select(*arguments, **options).models]


class TestDefaults:
    """What is measured when nothing is said."""

    @pytest.mark.parametrize(("device", "models"), [("cuda", ["codonfm_5b", "llama3_8b"]), ("cpu", ["tiny"])])
    def test_models_fit_the_device(self, device: str, models: list[str]) -> None:
        """Two real ones on a GPU, and one on the CPU that takes a minute there."""
        assert names(device) == models

    @pytest.mark.parametrize("device", ["cuda", "cpu"])
    def test_all_else_is_the_same_everywhere(self, device: str) -> None:
        """Every stage, every recipe but fp16, both modes, no shapes."""
        selection = select(device)
        assert selection.stages == tuple(STAGES)
        assert selection.recipes == DEFAULT_RECIPES
        assert selection.modes == MODES
        assert selection.shapes is None


class TestNames:
    """What is asked for by name."""

    def test_models_are_those_named_as_the_table_has_them(self) -> None:
        """Unchanged, in the order of the table, each once."""
        asked = ["llama3_8b", "tiny", "llama3_8b"]
        assert select("cuda", asked).models == (MODELS["tiny"], MODELS["llama3_8b"])

    def test_fp16_is_there_when_it_is_named(self) -> None:
        """Not by default only."""
        assert select("cpu", recipes=["fp16"]).recipes == ("fp16",)

    def test_recipes_can_be_left_out(self) -> None:
        """Of the default ones and of named ones; leaving out what is not there is no error."""
        assert select("cpu", without=["mxfp8", "nvfp4"]).recipes == DEFAULT_RECIPES[:4]
        assert select("cpu", recipes=["bf16", "mxfp8"], without=["mxfp8", "nvfp4"]).recipes == ("bf16",)

    def test_a_model_is_found_by_its_name(self) -> None:
        """And its linears under the same name."""
        selection = select("cpu", ["tiny"], {"sequence_length": 64}, shapes="8x16x32")
        model = selection.model("tiny+sequence_length:64")
        assert model.sequence_length == 64
        assert list(selection.groups) == ["tiny+sequence_length:64", "shapes"]
        assert {linear.tokens for linear in selection.groups[model.name].linears} == {64}
        with pytest.raises(KeyError):
            selection.model("tiny")


class TestShapes:
    """Shapes given by hand."""

    def test_alone_they_select_no_layer(self) -> None:
        """Only their GEMMs."""
        selection = select("cpu", shapes="128x256x512")
        assert selection.models == ()
        assert selection.layer_cases() == []
        assert {case.model for case in selection.gemm_cases()} == {"shapes"}

    def test_beside_a_model_both_are_measured(self) -> None:
        """Its layers, its GEMMs and the shapes'."""
        selection = select("cpu", ["tiny"], shapes="128x256x512")
        assert {case.model for case in selection.layer_cases()} == {"tiny"}
        assert {case.model for case in selection.gemm_cases()} == {"tiny", "shapes"}


class TestHyperparameters:
    """Numbers change models or define one."""

    def test_hidden_size_and_heads_define_a_new_model(self) -> None:
        """Named after everything that was given, instead of the default models."""
        given = {"hidden_size": 64, "num_attention_heads": 4, "micro_batch_size": 2}
        assert names("cuda", hyperparameters=given) == [
            "custom+hidden_size:64+num_attention_heads:4+micro_batch_size:2"
        ]

    def test_others_change_the_default_models(self) -> None:
        """Each of them, and the name says so."""
        changed = names("cuda", hyperparameters={"num_hidden_layers": 3})
        assert changed == ["codonfm_5b+num_hidden_layers:3", "llama3_8b+num_hidden_layers:3"]

    def test_with_a_named_model_they_change_it(self) -> None:
        """Also hidden size and heads."""
        given = {"hidden_size": 128, "num_attention_heads": 4}
        assert names("cpu", ["tiny"], given) == ["tiny+hidden_size:128+num_attention_heads:4"]

    def test_none_means_not_given(self) -> None:
        """As options that were left out are."""
        assert select("cpu", hyperparameters=dict.fromkeys(HYPERPARAMETERS)) == select("cpu")

    def test_beside_shapes_alone_they_still_define_a_model(self) -> None:
        """Hidden size and heads are as good as a name."""
        selected = names("cpu", shapes="8x16x32", hyperparameters={"hidden_size": 64, "num_attention_heads": 4})
        assert selected == ["custom+hidden_size:64+num_attention_heads:4"]


class TestErrors:
    """Whatever cannot be is said in one line."""

    @pytest.mark.parametrize(
        ("options", "words", "known"),
        [
            pytest.param({"models": ["tiny", "gpt5"]}, ["model", "'gpt5'"], MODELS, id="model"),
            pytest.param({"stages": ["te"]}, ["stage", "'te'"], STAGES, id="stage"),
            pytest.param({"recipes": ["fp8"]}, ["recipe", "'fp8'"], RECIPES, id="recipe"),
            pytest.param({"hyperparameters": {"width": 3}}, ["'width'"], HYPERPARAMETERS, id="hyperparameter"),
            pytest.param({"shapes": "128x256"}, ["'128x256'", "MxKxN"], [], id="shape"),
            pytest.param({"shapes": "8x16x32,"}, ["''", "MxKxN"], [], id="empty shape"),
            pytest.param({"shapes": "8x16x32,8x16x32"}, ["8x16x32", "more than once"], [], id="shape twice"),
            pytest.param({"hyperparameters": {"sequence_length": 0}}, ["sequence_length=0", "positive"], [], id="zero"),
            pytest.param({"hyperparameters": {"hidden_size": -64}}, ["hidden_size=-64", "positive"], [], id="negative"),
            pytest.param(
                {"hyperparameters": {"num_key_value_heads": 3}},
                ["num_attention_heads=8", "multiple of num_key_value_heads=3"],
                [],
                id="heads that do not divide",
            ),
        ],
    )
    def test_it_names_what_is_wrong_and_what_is_known(
        self, options: dict[str, Any], words: list[str], known: list[str]
    ) -> None:
        """ValueError, with the rule or with every known name."""
        with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
            select("cpu", **options)
        message = str(caught.value)
        assert "\n" not in message
        assert [word for word in (*words, *known) if word not in message] == []
