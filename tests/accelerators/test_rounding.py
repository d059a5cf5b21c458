"""Stochastic rounding in hardware, on the stand-in: what the runtime is told, and when; and what the optimizer does.

The stand-in rounds to nearest, so that a run with hardware rounding has to have the bits of ``precision.mode=bf16``
there: the optimizer only converts. That the real hardware rounds without bias is not tested by anything.
"""

import os

import pytest
import torch

from hlat.config import Recipe
from hlat.config.load import parse_recipe
from hlat.runtime.backend.table import backend_of
from hlat.runtime.errors import LaunchError
from hlat.runtime.process import RankInfo
from hlat.training import configure_rounding
from tests.accelerators.conftest import Runs, losses
from tests.support.neuron.running import RankError, on_neuron

ENABLED, SEED = "NEURON_RT_STOCHASTIC_ROUNDING_EN", "NEURON_RT_STOCHASTIC_ROUNDING_SEED"
SHORT = ("training.steps=3", "schedule.warmup_steps=0")
UNCOMPILED = {"TORCH_COMPILE_DISABLE": "1"}  # the update, for the time of these tests; torch's own variable
HARDWARE = ("precision.mode=bf16-sr", "precision.rounding=hardware", "run.deterministic=false")


def recipe(rounding: str = "hardware", device: str = "neuron", seed: int = 3) -> Recipe:
    return parse_recipe(
        {
            "run": {"deterministic": False, "device": device},
            "model": {"vocab_size": 64, "layers": 1, "hidden_size": 32, "intermediate_size": 96, "heads": 4},
            "data": {"path": "none", "sequence_length": 16, "tokenizer": {"train": "char"}},
            "training": {"steps": 9, "seed": seed},
            "precision": {"mode": "bf16-sr", "rounding": rounding},
        },
        world=1,
    )


def told(rounding: str, seed: int, rank: int, first: bool) -> tuple[str | None, str | None]:
    """Configure a process, which may have started its runtime before; what the environment says then."""
    if first:
        torch.ones(1, device="neuron")
    configure_rounding(recipe(rounding, seed=seed), RankInfo(rank, 8, rank, 0))
    assert backend_of("neuron").is_initialized() == first, "configuring starts nothing"
    return os.environ.get(ENABLED), os.environ.get(SEED)


def test_the_runtime_is_told_before_it_starts_and_every_rank_has_its_own_seed() -> None:
    found = {(seed, rank): on_neuron(told, "hardware", seed, rank, False)[0] for seed, rank in ((3, 0), (3, 1), (4, 0))}
    assert {enabled for enabled, _ in found.values()} == {"1"}
    seeds = [int(value) for _, value in found.values()]
    assert len(set(seeds)) == 3 and all(0 <= value < 2**31 for value in seeds)
    assert on_neuron(told, "hardware", 3, 0, False)[0] == found[3, 0], "a function of seed and rank"
    assert on_neuron(told, "software", 3, 0, False) == [(None, None)]
    with pytest.raises(RankError, match="has started the Neuron runtime already"):
        on_neuron(told, "hardware", 3, 0, True)


@pytest.mark.parametrize("value", ["1", "true"])
def test_hardware_that_rounds_what_the_optimizer_has_rounded_is_refused(value: str) -> None:
    with pytest.raises(RankError, match=rf"{ENABLED}={value} is set.*Unset it.*precision.rounding=hardware"):
        on_neuron(told, "software", 3, 0, False, env={ENABLED: value})
    assert on_neuron(told, "software", 3, 0, False, env={ENABLED: "0"}) == [("0", None)]


def test_a_device_without_it_refuses() -> None:
    with pytest.raises(LaunchError, match=r"cpu devices do not round stochastically.*precision\.rounding=software"):
        configure_rounding(recipe(device="cpu"), RankInfo())
    configure_rounding(recipe("software", device="cpu"), RankInfo())


def test_the_optimizer_only_converts_and_a_run_may_change_who_rounds(runs: Runs) -> None:
    hardware = runs.try_on_neuron("hardware", *HARDWARE, *SHORT, env=UNCOMPILED)
    assert "the device rounds every conversion" in hardware.stdout, hardware.stderr
    plain = runs.on_neuron("plain-bf16", "precision.mode=bf16", *SHORT, env=UNCOMPILED)
    assert losses(runs.folder("hardware")) == losses(plain), "the same bits, as the stand-in rounds to nearest"
    software = runs.on_neuron("software", "precision.mode=bf16-sr", *SHORT, env=UNCOMPILED)
    assert losses(software) != losses(plain)
    longer = ("training.steps=4", "schedule.horizon_steps=3", SHORT[1])
    resumed = runs.try_on_neuron("software", *HARDWARE, *longer, env=UNCOMPILED)
    assert resumed.returncode == 0, resumed.stderr
    assert "changed since the checkpoint: precision.rounding: 'software' -> 'hardware'" in resumed.stdout
