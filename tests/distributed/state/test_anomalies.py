"""Two ranks handle anomalies identically without communicating; the laws are those of one process (tests/training)."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml

from hlat.config.load import parse_recipe
from hlat.runtime.distributed.join import Runtime
from hlat.training import run
from tests.support.distributed.workers import Pool
from tests.support.same_runs import assert_same_state, events_of, metrics_of, newest, rewrite

LAST, EVERY, NAN, SPIKE = 16, 6, 9, 15
LAYOUTS: dict[str, dict[str, Any]] = {
    "prepared, DP2 ZeRO 1": {"parallel": {"zero": 1}},
    "online, TP2": {"parallel": {"tensor": 2}, "data": {"mode": "online", "streams": 32}},
    "prepared, DP2 ZeRO 3": {"parallel": {"zero": 3}},
    "prepared, PP2": {"parallel": {"pipeline": 2}},
    "online, DP2 ZeRO 0, bf16-sr": {
        "parallel": {"zero": 0},
        "data": {"mode": "online", "streams": 32},
        "precision": {"mode": "bf16-sr"},
    },
}
SOME = list(LAYOUTS)[:2]  # the other layouts are in the slow suite


def train_here(runtime: Runtime, content: dict[str, Any]) -> None:
    """Run a complete training run in the world that the pool has joined."""
    recipe = parse_recipe(content, world=runtime.world)
    with patch("hlat.training.loop.joined_run", lambda *_: nullcontext(runtime)):
        run(recipe, allow_faults=True)


@pytest.mark.parametrize("layout", [*SOME, *(pytest.param(name, marks=pytest.mark.slow) for name in list(LAYOUTS)[2:])])
def test_a_nan_on_one_rank_is_skipped_on_both_and_a_spike_is_rolled_back(
    pool: Pool, layout: str, tiny_recipe: str, corpus: Path, tmp_path: Path
) -> None:
    def train(name: str, *faults: dict[str, Any], steps: int = LAST) -> Path:
        content = yaml.safe_load(tiny_recipe)
        changes = {
            "run": {"dir": str(tmp_path / name)},
            "data": {"path": str(corpus), "prepared_dir": str(tmp_path / "data")},
            "training": {"log_every": 1, "stop_after": steps},
            "checkpoint": {"every_steps": EVERY, "keep_last": 9, "background": False},
            "anomalies": {"window": 8, "spike": "rollback"},
            "tracking": {"console": "none", "tensorboard": False},
        }
        for section in (changes, LAYOUTS[layout], {"faults": list(faults)}):
            for key, value in section.items():
                content[key] = {**content.get(key, {}), **value} if isinstance(value, dict) else value
        pool.run(2, train_here, content)
        return tmp_path / name

    spike = {"kind": "spike", "at_step": SPIKE}
    found = train("found", {"kind": "nan", "at_step": NAN, "rank": 1}, spike)
    assert [(one["step"], one["action"]) for one in events_of(found, "anomaly")] == [(NAN, "skip"), (SPIKE, "rollback")]

    # The expected run: skip the NaN step by reusing the state before it, and exclude the samples of the spike.
    before, after = (newest(train(f"until {k}", steps=k)) for k in (NAN - 1, NAN))
    cursors = {name: tensor for name, tensor in after.load("").items() if name.startswith("data.")}
    assert bool(cursors) == ("online" in layout)
    rollback = {"step": SPIKE, "samples": [8 * (SPIKE - 1), 8 * SPIKE]}
    record = {**before.meta["anomalies"], "skipped_steps": [NAN], "rollbacks": [rollback]}
    wanted = tmp_path / f"until {NAN}"
    rewrite(wanted, NAN, before.load("") | cursors, {**after.meta, "anomalies": record})
    train(wanted.name, spike, steps=LAST - NAN)
    assert_same_state(found, wanted)
    assert newest(found).meta["anomalies"] == newest(wanted).meta["anomalies"]
    assert metrics_of(found)[NAN:] == metrics_of(wanted)[NAN:]
    assert events_of(wanted, "anomaly") == []

    # The data position is that of a run without anomalies that has read as many samples.
    plain, position = train("plain", steps=LAST + 1), newest(found)
    assert position.meta["samples"] == newest(plain).meta["samples"] == 8 * (LAST + 1)
    assert position.meta["tokens"] == 256 * LAST
    left, right = (one.load("data.") for one in (position, newest(plain)))
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
