"""Precision of a run: ``auto`` is resolved once, and kept when the run resumes."""

import io
from pathlib import Path

import pytest
import torch
import yaml

from hlat.checkpoint.protocol.reader import read_meta, resolve
from hlat.config import Recipe
from hlat.config.load import parse_recipe
from hlat.evaluation import evaluate_checkpoint
from hlat.runtime.backend.cpu import CpuBackend
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.distributed.join import Runtime
from hlat.runtime.errors import CheckpointError
from hlat.runtime.storage.run_folder import hold_run_folder
from hlat.training import numerics as precision
from hlat.training import run
from hlat.training.run_state import RunState, build_run_state
from hlat.training.start import run_lock
from tests.support.same_runs import assert_same_state

ON_A_CPU = ("fp32", "mixed", "bf16-sr", "bf16", "bf16-kahan")


class _Peers(HostGroup):
    """Process group of a single process with the given answers of other ranks."""

    def __init__(self, others: list[bool]) -> None:
        super().__init__()
        self._others = others

    def all_gather(self, value: bool) -> list[bool]:
        return [value, *self._others]


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch):
    """Function that sets whether this device has fast bf16."""
    return lambda answer: monkeypatch.setattr(CpuBackend, "has_fast_bf16", lambda self, device: answer)


@pytest.fixture
def recipe_in(tiny_recipe: str, corpus: Path, prepared: Path, tmp_path: Path):
    """Function that makes the tiny recipe with a precision mode and a run name."""

    def recipe(mode: str | None, name: str = "run", steps: int = 4, **sections: dict[str, object]) -> Recipe:
        content = yaml.safe_load(tiny_recipe)
        del content["precision"]
        if mode is not None:
            content["precision"] = {"mode": mode}
        content["run"]["dir"] = str(tmp_path / name)
        content["data"] |= {"path": str(corpus), "prepared_dir": str(prepared)}
        content["schedule"]["warmup_steps"] = 2
        content["training"] |= {"steps": 4, "stop_after": steps, "log_every": 1}
        content["checkpoint"] |= {"every_steps": 2}
        content["tracking"] = {"tensorboard": False, "console": "plain"}
        for section, values in sections.items():
            content[section] |= values
        return parse_recipe(content)

    return recipe


def trained(recipe: Recipe) -> str:
    """Train; return the output."""
    said = io.StringIO()
    run(recipe, stream=said)
    return said.getvalue()


def mode_of(recipe: Recipe) -> str:
    return read_meta(resolve(recipe.run_dir))["recipe"]["precision"]["mode"]


@pytest.mark.parametrize(
    ("here", "others", "mode"),
    [
        (True, [], "mixed"),
        (False, [], "fp32"),
        (True, [True], "mixed"),
        (True, [False], "fp32"),
        (False, [True], "fp32"),
    ],
)
def test_auto_is_mixed_if_every_device_has_fast_bf16(fast, recipe_in, here, others, mode):
    fast(here)
    runtime = Runtime(torch.device("cpu"), ranks=_Peers(others))
    resolved, said = precision.resolve_precision(recipe_in(None), runtime, None)
    assert resolved.precision.mode == mode
    assert said is not None and f"auto: {mode}" in said


@pytest.mark.parametrize("answer", [True, False])
def test_a_mode_named_in_the_recipe_is_kept(fast, recipe_in, answer):
    fast(answer)
    for mode in (*ON_A_CPU, "fp8"):
        recipe = recipe_in(mode)
        assert precision.resolve_precision(recipe, Runtime(torch.device("cpu")), None) == (recipe, None)


def test_products_that_a_gpu_emulates_are_warned_of(recipe_in, monkeypatch):
    """A GPU of compute capability 7.5 multiplies bf16 one by one; a CPU without instructions multiplies in fp32."""
    device = torch.device("cuda")
    for capability, warned in (((7, 5), ["mixed", "bf16-sr"]), ((8, 0), [])):
        monkeypatch.setattr("hlat.runtime.backend.cuda.compute_capability", lambda device, found=capability: found)
        found = [recipe_in(mode).precision.mode for mode in ("fp32", "mixed", "bf16-sr")]
        said = {mode: precision.resolve_precision(recipe_in(mode), Runtime(device), None)[1] for mode in found}
        assert [mode for mode, words in said.items() if words] == warned
        assert all("precision.mode=fp32 is faster here" in said[mode] for mode in warned)


@pytest.mark.parametrize(("began", "mode"), [(True, "mixed"), (False, "fp32")])
def test_a_run_keeps_its_precision_when_it_resumes_on_another_kind_of_device(fast, recipe_in, monkeypatch, began, mode):
    """It ends with the bits of a run whose recipe names the mode, logs the choice, and records the mode."""
    monkeypatch.setenv("HLAT_VERBOSE", "1")
    fast(began)
    assert f"precision.mode=auto: {mode}, as" in trained(recipe_in(None, steps=2))
    assert mode_of(recipe_in(None)) == mode
    fast(not began)
    said = trained(recipe_in(None))
    assert f"precision.mode=auto: {mode}, which the run began with; " in said and "resumed at step 2" in said
    assert "changed since the checkpoint: precision" not in said
    assert mode_of(recipe_in(None)) == mode
    trained(recipe_in(mode, "named"))
    assert_same_state(recipe_in(None).run_dir, recipe_in(mode, "named").run_dir)
    assert evaluate_checkpoint(recipe_in(None).run_dir) == evaluate_checkpoint(recipe_in(mode, "named").run_dir)


def build_state_of(recipe: Recipe) -> RunState:
    """Build the RunState of a recipe in this process, in the run's folder."""
    recipe.run_dir.mkdir(parents=True, exist_ok=True)
    with run_lock(recipe.run_dir) as lock, hold_run_folder(recipe.run_dir, lock, 0) as folder:
        return build_run_state(recipe, Runtime(torch.device("cpu")), folder)


@pytest.mark.parametrize("old", ON_A_CPU)
def test_a_run_is_not_resumed_in_another_mode(recipe_in, old):
    trained(recipe_in(old, steps=2))
    for new in (*ON_A_CPU, "fp8"):
        if new != old:
            with pytest.raises(CheckpointError, match=f"precision.mode: saved with '{old}', now '{new}'"):
                build_state_of(recipe_in(new))
    assert build_state_of(recipe_in(old)).step == 2
    assert build_state_of(recipe_in("auto")).recipe.precision.mode == old


@pytest.mark.parametrize(("old", "new"), [("bf16-kahan", "bf16-sr"), ("bf16-sr", "fp32"), ("mixed", "bf16")])
def test_a_new_run_loads_weights_of_any_mode(recipe_in, old, new):
    """``init_from`` converts weights: bf16 to fp32 is exact, fp32 to bf16 rounds."""
    source = recipe_in(old, steps=2)
    trained(source)
    state = build_state_of(recipe_in(new, "another", checkpoint={"init_from": str(source.run_dir)}))
    assert state.step == 0 and state.recipe.precision.mode == new
    weights = build_state_of(source).model.local_parameters
    for ours, theirs in zip(state.model.local_parameters, weights, strict=True):
        assert torch.equal(ours.tensor, theirs.tensor.to(ours.tensor.dtype))


@pytest.mark.parametrize(
    ("mode", "is_fast", "new", "expected"),
    [
        ("mixed", True, True, "mixed, as every device has fast bf16"),
        ("fp32", False, True, "fp32, as not every device has fast bf16"),
        ("mixed", True, False, "mixed, which the run began with"),
        ("fp32", False, False, "fp32, which the run began with"),
        ("mixed", False, False, "mixed, which the run began with; not every device here has fast bf16, so fp32 might"),
        ("fp32", True, False, "fp32, which the run began with; every device here has fast bf16: a new run would be"),
    ],
)
def test_the_choice_is_explained(mode: str, is_fast: bool, new: bool, expected: str) -> None:
    reason = precision._reason(mode, is_fast, new)
    assert reason.startswith(expected) and (reason == expected or ";" in expected)
