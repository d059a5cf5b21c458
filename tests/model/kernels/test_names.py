"""Names of what computes a model are saved; a run resumes with another one only if somebody asked for that."""

from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from hlat.checkpoint import RecipeChange
from hlat.config.load import parse_recipe
from hlat.model import product_library
from hlat.model.kernels import matmul
from hlat.runtime.backend.cpu import CpuBackend
from hlat.runtime.errors import CheckpointError
from hlat.training.numerics import Arithmetic
from tests.support.model.kernel_cases import torch_only

CPU = torch.device("cpu")
RUNTIME = SimpleNamespace(device=CPU, world=1)


def recipe_of(mode: str, compile: str = "none"):
    return parse_recipe(
        {
            "model": {"vocab_size": 320, "layers": 2, "heads": 4, "hidden_size": 32, "intermediate_size": 96},
            "data": {"path": "none", "tokenizer": {"train": "char"}},
            "precision": {"mode": mode},
            "run": {"compile": compile},
            "training": {"steps": 10},
        }
    )


def named(mode: str, onednn: bool, compile: str = "none") -> Arithmetic:
    with ExitStack() as stack:
        stack.enter_context(torch_only())
        stack.enter_context(patch.object(CpuBackend, "fp32_by_onednn", onednn))
        return Arithmetic.of(recipe_of(mode, compile), RUNTIME)


@pytest.mark.parametrize(("mode", "products"), [("fp32", "oneDNN"), ("bf16-sr", product_library(torch.bfloat16, CPU))])
def test_products_by_onednn_have_another_name_if_the_mode_computes_in_fp32(mode: str, products: str) -> None:
    """The name is that of the function that computes: the same condition decides both."""
    assert named(mode, onednn=True).products == products
    assert named("fp32", onednn=False).products == "torch"
    with patch.object(CpuBackend, "fp32_by_onednn", True):
        assert matmul.uses_onednn(torch.zeros(1)) and not matmul.uses_onednn(torch.zeros(1).bfloat16())


def test_compiled_blocks_do_not_call_onednn() -> None:
    assert named("fp32", onednn=True, compile="blocks").products == "compiled code"


def test_products_widened_to_fp32_have_a_name() -> None:
    with patch.object(matmul, "_EMULATE_BF16", "cpu"):
        assert product_library(torch.bfloat16, CPU) == "torch, widened to fp32"
        assert product_library(torch.float32, CPU) != "torch, widened to fp32"


def test_a_checkpoint_of_another_library_of_products_is_told() -> None:
    now, before = named("fp32", onednn=True), named("fp32", onednn=False)
    [message] = now.differences(now.saved_in(before.names()))
    assert message.startswith("products with weights: computed by oneDNN, before the checkpoint by torch: ")
    assert list(now.differences(now.saved_in(now.names()))) == []


@pytest.mark.parametrize(("onednn", "count"), [(True, 1), (False, 0)])
def test_versions_that_did_not_save_the_name_computed_products_with_torch(onednn: bool, count: int) -> None:
    now = named("fp32", onednn)
    names = {part: name for part, name in now.names().items() if part != "products"}
    assert len(list(now.differences(now.saved_in(names)))) == count
    assert len(list(now.differences(now.saved_in({})))) == count, "torch computed everything"


@pytest.mark.parametrize("asked", ["run.compile", "run.device", "parallel.tensor"])
def test_products_change_with_the_fields_that_decide_about_them(asked: str) -> None:
    now, before = named("fp32", onednn=False, compile="blocks"), named("fp32", onednn=False)
    now.check_resume(before.names(), recipe_of("fp32"), [RecipeChange(asked, 1, 2)])
    for changes in ([], [RecipeChange("run.name", "a", "b"), RecipeChange("tracking.console", "a", "b")]):
        with pytest.raises(CheckpointError, match="products with weights: computed by compiled code"):
            now.check_resume(before.names(), recipe_of("fp32"), changes)


def test_kernels_do_not_change_with_the_length_of_a_run() -> None:
    before = replace(named("fp32", onednn=False), kernels="fused C kernels (gcc 12.2.0, avx512)")
    now = named("fp32", onednn=False)
    with pytest.raises(CheckpointError, match="norms, RoPE, SwiGLU and loss: computed by torch"):
        now.check_resume(before.names(), recipe_of("fp32"), [RecipeChange("training.steps", 1, 2)])
    now.check_resume(before.names(), recipe_of("fp32"), [RecipeChange("run.device", "cpu", "cuda")])
    now.check_resume({}, recipe_of("fp32"), [])  # versions of hlat that saved no names
