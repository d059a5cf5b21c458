"""The replica check finds all replicated tensors in real layouts; they stay equal, and a flipped bit is located."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml

from hlat.config.load import parse_recipe
from hlat.optim import build_optimizer
from hlat.parallel import build_parallel
from hlat.resilience import ReplicaCheck
from hlat.runtime.distributed.join import Runtime
from hlat.runtime.errors import CorruptionError, PersistentCorruptionError
from hlat.training import accumulate_gradients, run, update
from tests.support.distributed.jobs import batch_of
from tests.support.distributed.layouts import CASES, Case, recipe_content
from tests.support.distributed.workers import Pool
from tests.support.same_runs import assert_same_run, events_of, newest

Flip = tuple[int, str, int]
"""Which rank, weights or which state, which of the parameters."""


def compared(runtime: Runtime, content: dict[str, Any], flips: list[Flip]) -> list[Any]:
    """Train two steps; return the differences without a flip, and after each flip (which is undone)."""
    recipe = parse_recipe(content, world=runtime.world)
    model = build_parallel(recipe, runtime, recipe.training.seed)
    optimizer = build_optimizer(model.local_parameters, recipe.optimizer, recipe.precision.mode)
    copies = ReplicaCheck(model.local_parameters, optimizer, runtime.ranks)
    for step in (1, 2):
        update(model, optimizer, recipe, step, accumulate_gradients(model, batch_of(model, recipe, step)))
    if not copies.has_replicas:
        return []
    found = [copies.compare()]
    for rank, kind, index in flips:
        tensors = {
            "weights": [one.tensor for one in model.local_parameters],
            **optimizer.state_tensors(model.local_parameters),
        }[kind]
        last = tensors[index].view(-1).view(torch.int32 if tensors[index].element_size() == 4 else torch.int16)
        for _ in range(2):
            if runtime.rank == rank:
                last[-1] ^= 1  # lowest bit of the last element
            found.append(copies.compare())
        assert found.pop() == [], "undone"
    return found


def _case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


HELD_TWICE = {
    # name: flips, and the expected findings: canonical tensor, ranks that have it, outvoted ranks
    "DP2, ZeRO 0": (
        Case("DP2, ZeRO 0", 2, {"zero": 0}),
        [((1, "weights", 0), "weights of model.embed_tokens.weight", {0, 1}, set())],
    ),
    "DP4, ZeRO 0": (
        Case("DP4, ZeRO 0", 4, {"zero": 0}),
        [
            ((3, "exp_avg", 1), "exp_avg of model.layers.0.input_layernorm.weight", {0, 1, 2, 3}, {3}),
            ((0, "exp_avg_sq", 0), "exp_avg_sq of model.embed_tokens.weight", {0, 1, 2, 3}, {0}),
        ],
    ),
    "hybrid 2 x 2, ZeRO 3": (
        _case("hybrid 2 x 2, ZeRO 3"),
        [((2, "weights", 0), "weights of model.embed_tokens.weight", {0, 2}, set())],
    ),
    "TP4 + SP, 2 kv heads": (
        _case("TP4 + SP, 2 kv heads"),
        [
            ((2, "weights", 1), "weights of model.layers.0.input_layernorm.weight", {0, 1, 2, 3}, {2}),
            ((1, "weights", 2), "weights of model.layers.0.self_attn.v_proj.weight", {0, 1}, set()),
        ],
    ),
    "PP2, tied": (_case("PP2, tied"), [((1, "exp_avg", -1), "exp_avg of model.embed_tokens.weight", {0, 1}, set())]),
}


@pytest.mark.parametrize("name", HELD_TWICE)
def test_replicas_stay_equal_and_a_flipped_bit_is_located(pool: Pool, name: str) -> None:
    case, flips = HELD_TWICE[name]
    everyone = pool.run(case.world, compared, recipe_content(case), [flip for flip, *_ in flips])
    assert all(found == everyone[0] for found in everyone), "every rank finds the same"
    equal, *differing = everyone[0]
    assert equal == []
    for found, (_, what, ranks, outvoted) in zip(differing, flips, strict=True):
        (mismatch,) = found
        assert mismatch.name.startswith(f"{what}, rows ") and (mismatch.ranks, mismatch.outvoted) == (ranks, outvoted)


@pytest.mark.parametrize("name", ["DP2, ZeRO 1", "DP2, ZeRO 3", "PP2 1f1b"])
def test_without_replicas_nothing_is_compared(pool: Pool, name: str) -> None:
    assert pool.run(2, compared, recipe_content(_case(name)), []) == [[], []]


@pytest.mark.parametrize("mode", ["bf16-sr", "bf16-kahan"])
def test_bf16_replicas_stay_equal_too(pool: Pool, mode: str) -> None:
    """The compensation of bf16-kahan is compared too."""
    kind = "compensation" if mode == "bf16-kahan" else "exp_avg"
    content = recipe_content(Case("DP2, ZeRO 0", 2, {"zero": 0}), precision={"mode": mode})
    (equal, (mismatch,)), other = pool.run(2, compared, content, [(0, kind, 3)])
    assert equal == [] and mismatch.name.startswith(f"{kind} of ") and other == [equal, [mismatch]]


def train_here(runtime: Runtime, content: dict[str, Any]) -> tuple[str, int, str] | None:
    """Run a complete training run in the world that the pool has joined; return its error."""
    recipe = parse_recipe(content, world=runtime.world)
    with patch("hlat.training.loop.joined_run", lambda *_: nullcontext(runtime)):
        try:
            run(recipe, allow_faults=True)
        except CorruptionError as error:
            return type(error).__name__, error.exit_code, str(error)
    return None


class Runs:
    """Training runs of data-parallel ranks without sharding, on the same text."""

    def __init__(self, pool: Pool, world: int, folder: Path, recipe: str, corpus: Path) -> None:
        self.pool, self.world, self.folder = pool, world, folder
        self.content = yaml.safe_load(recipe)
        self.content["data"] |= {"path": str(corpus), "prepared_dir": str(folder / "data")}
        self.content["batch"] = {"global_batch": 2 * world, "micro_batch": 2}
        self.content["training"] |= {"steps": 14, "log_every": 1}
        self.content["checkpoint"] = {"every_steps": 4, "keep_last": 9, "background": False}
        self.content |= {"parallel": {"zero": 0}, "tracking": {"console": "none", "tensorboard": False}}

    def train(self, name: str, *faults: dict[str, Any], **integrity: Any) -> Any:
        """Return the error of a run; it has to be the same on every rank."""
        sections = {"run": {"dir": str(self.folder / name)}, "faults": list(faults), "integrity": integrity}
        ends = self.pool.run(self.world, train_here, self.content | sections)
        assert all(end == ends[0] for end in ends)
        return ends[0]


@pytest.mark.parametrize("world", [2, 3])
def test_a_flipped_bit_is_found_before_it_is_saved_and_the_run_recovers(
    pool: Pool, world: int, tiny_recipe: str, corpus: Path, tmp_path: Path
) -> None:
    """The corrupt one of three ranks is named at once; of two, both are, and the right one after repeating the steps.

    The bit belongs to a token that does not occur in the text, so that no gradient carries it to other ranks.
    """
    runs = Runs(pool, world, tmp_path, tiny_recipe, corpus)
    assert runs.train("undisturbed") is None
    fault = {"kind": "bitflip", "at_step": 6, "rank": 1}
    kind, code, message = runs.train("flipped", fault)
    assert (kind, code) == ("CorruptionError", 5)
    assert "step 8: replicas that must be equal differ: weights of model.embed_tokens.weight, rows 0 to " in message
    assert ("By majority rank 1 on" in message) == (world == 3)
    flipped = tmp_path / "flipped"
    (event,) = events_of(flipped, "corruption")
    assert (event["step"], event["ranks"], event["decided"]) == (8, [1] if world == 3 else [0, 1], world == 3)
    assert event["tensors"] == 1, "the moments are those of gradients that all have added up"
    assert newest(flipped).meta["step"] == 4 and (flipped / "integrity.json").exists()
    assert runs.train("flipped", fault) is None
    assert_same_run(flipped, tmp_path / "undisturbed")
    (explained,) = events_of(flipped, "corruption_explained")
    assert (explained["step"], explained["ranks"]) == (8, [1])
    assert not (flipped / "integrity.json").exists()


def test_repeating_the_step_identifies_the_corrupt_one_of_two_ranks(
    pool: Pool, tiny_recipe: str, corpus: Path, tmp_path: Path
) -> None:
    """A bit flipped after the reduction of gradients has not reached any other rank yet."""
    runs = Runs(pool, 2, tmp_path, tiny_recipe, corpus)
    fault = {"kind": "bitflip", "at_step": 6, "rank": 1, "phase": "optimizer"}
    kind, _, message = runs.train("flipped", fault, every_steps=1)
    assert kind == "CorruptionError" and "step 6: " in message and "no majority among" in message
    assert runs.train("flipped", fault, every_steps=1) is None
    (explained,) = events_of(tmp_path / "flipped", "corruption_explained")
    assert (explained["step"], explained["ranks"]) == (6, [1])


def test_repeated_corruption_of_the_same_rank_ends_the_run_without_restart(
    pool: Pool, tiny_recipe: str, corpus: Path, tmp_path: Path
) -> None:
    runs = Runs(pool, 3, tmp_path, tiny_recipe, corpus)
    first, second = ({"kind": "bitflip", "at_step": step, "rank": 2} for step in (6, 7))
    assert runs.train("flipped", first)[:2] == ("CorruptionError", CorruptionError.exit_code)
    kind, code, message = runs.train("flipped", first, second)
    assert (kind, code) == ("PersistentCorruptionError", PersistentCorruptionError.exit_code)
    assert (CorruptionError.retryable, PersistentCorruptionError.retryable) == (True, False), "what a supervisor asks"
    assert "rank 2 on" in message and "2 times in a row: the corruption is persistent" in message
    assert [event["repeated"] for event in events_of(tmp_path / "flipped", "corruption")] == [1, 2]
    assert newest(tmp_path / "flipped").meta["step"] == 4


def test_nothing_is_compared_if_the_recipe_disables_the_check(
    pool: Pool, tiny_recipe: str, corpus: Path, tmp_path: Path
) -> None:
    """Counterpart of the tests above: without the check, corrupt state is saved."""
    runs = Runs(pool, 2, tmp_path, tiny_recipe, corpus)
    assert runs.train("flipped", {"kind": "bitflip", "at_step": 6, "rank": 1}, before_saves=False) is None
    assert newest(tmp_path / "flipped").meta["step"] == 14
    assert events_of(tmp_path / "flipped", "corruption") == []
