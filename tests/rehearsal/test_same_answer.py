"""A run, its rehearsal and its plan name the same kernel of attention, compile mode and dtypes."""

from typing import Any

import pytest
import torch

from hlat.config import Recipe
from hlat.hardware import load_catalog
from hlat.model import deterministic_by_default
from hlat.parallel import decide_compilation
from hlat.planner.problem.devices import planned_execution
from hlat.planner.problem.layouts import recipe_on_chip
from hlat.precision import MODES
from hlat.rehearsal import parse_device
from hlat.rehearsal.simulated_device import decide
from hlat.runtime.backend.table import simulated_backend
from hlat.runtime.distributed.join import Runtime
from hlat.training.numerics import Arithmetic
from tests.support.rehearsal.small_recipes import SMALL, recipe_of

CATALOG, HERE = load_catalog(), torch.device("cpu")
DEVICES = {"h100": "cuda:h100", "a100": "cuda:a100-80gb", "trn2": "neuron"}
LLAMA = {**SMALL["model"], "hidden_size": 512, "heads": 4, "kv_heads": 2}  # heads of 128
MHA = {**SMALL["model"], "hidden_size": 512, "heads": 4, "kv_heads": 4}
WIDE = {**LLAMA, "hidden_size": 1024, "heads": 4, "kv_heads": 4}  # heads of 256
ODD = {**LLAMA, "hidden_size": 400, "heads": 4, "kv_heads": 4}  # heads of 100
FP32 = {"precision": {"mode": "fp32"}}
FLASH, SLOWED, CUDNN = "flash_attention", "flash_attention, deterministic backward", "cudnn_attention"
FLEX, EFFICIENT = "flex_attention within documents", "efficient_attention"
NEURON = "overrideable"

# name -> processes, sections of the recipe, kernel on H100, A100 and Trainium2; read from sdp_utils.cpp of torch 2.13
TABLE: dict[str, tuple[int, dict[str, Any], str, str, str]] = {
    "auto": (1, {}, CUDNN, FLASH, NEURON),
    "deterministic": (1, {"run": {"deterministic": True}}, SLOWED, SLOWED, NEURON),
    "fast": (1, {"run": {"deterministic": False}}, CUDNN, FLASH, NEURON),
    "bf16-sr": (1, {"precision": {"mode": "bf16-sr"}}, CUDNN, FLASH, NEURON),
    "fp32, grouped": (1, FP32, "math", "math", NEURON),
    "fp32": (1, {**FP32, "model": MHA}, EFFICIENT, EFFICIENT, NEURON),
    "fp32, a kv head per rank": (
        4,
        {**FP32, "parallel": {"tensor": 4}, "run": {"deterministic": True}},
        EFFICIENT,
        EFFICIENT,
        NEURON,
    ),
    "documents": (1, {"data": {**SMALL["data"], "isolate": True}}, FLEX, FLEX, "none"),
    "window": (1, {"model": {**LLAMA, "sliding_window": 8, "architecture": "mistral"}}, FLEX, FLEX, "none"),
    "context": (2, {"parallel": {"context": 2}}, FLASH, FLASH, NEURON),
    "heads of 256": (1, {"model": WIDE, "run": {"compile": "none"}}, CUDNN, FLASH, NEURON),
    "heads of 100": (1, {"model": ODD}, FLASH, FLASH, NEURON),
}


def recipe(name: str) -> tuple[int, Recipe]:
    """World size and recipe of a row."""
    world, sections, *_ = TABLE[name]
    return world, recipe_of(world, **{"model": LLAMA, "precision": {"mode": "mixed"}, **sections})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TABLE)
def test_run_rehearsal_and_plan_give_the_same_answer(name: str, device: str) -> None:
    world, asked = recipe(name)
    simulated = parse_device(DEVICES[device], None, CATALOG)
    assert simulated is not None
    request, candidate = recipe_on_chip(asked, simulated.chip, world)
    planned = planned_execution(request, candidate)
    with simulated_backend(simulated.backend):
        resolved = asked.with_determinism(
            deterministic_by_default(asked, HERE) if asked.run.determinism is None else asked.run.determinism
        )
        ran = Arithmetic.of(resolved, Runtime(HERE, world=world))
        compiled = decide_compilation(resolved, HERE, world).on
        rehearsed = {decision.name: decision for decision in decide(resolved, world, HERE)}
    wanted = TABLE[name][2 + list(DEVICES).index(device)]
    assert str(planned.attention) == rehearsed["attention"].choice == wanted
    assert ran.attention == wanted.partition(",")[0]
    assert planned.deterministic is resolved.run.deterministic
    assert planned.compiled is compiled is rehearsed["blocks"].choice.startswith("compiled")
    assert compiled is (asked.run.compile != "none")
    compute, stored = MODES[request.mode].compute, MODES[request.mode].weights
    assert rehearsed["products"].choice == str(compute).removeprefix("torch.")
    assert str(stored).removeprefix("torch.") in rehearsed["precision"].reason


@pytest.mark.parametrize("name", TABLE)
def test_a_run_on_a_cpu_is_deterministic_at_no_cost(name: str) -> None:
    """A CPU has no other kernel: ``auto`` is true, and a run names hlat's own kernel, or torch's one for CPUs."""
    world, asked = recipe(name)
    assert deterministic_by_default(asked, HERE)
    ran = Arithmetic.of(asked.with_determinism(True), Runtime(HERE, world=world))
    assert ran.attention.startswith(("fused C kernel", FLASH))
    assert ran == Arithmetic.of(asked.with_determinism(False), Runtime(HERE, world=world))
    assert ran.attention.partition(", in fp32")[0].endswith("within documents") is (name in ("documents", "window"))
