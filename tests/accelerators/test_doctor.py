"""``hlat doctor`` on the stand-in, which refuses a device that is used before its process group exists, as the beta."""

import os
from pathlib import Path
from typing import Any

import pytest

from hlat.launch.preflight.examination import run_preflight
from hlat.launch.preflight.judgement import modules_of
from hlat.launch.preflight.request import PreflightOptions, make_request
from tests.support.neuron.building import build
from tests.support.neuron.running import on_neuron

OF_DEVICE = {"device", "memory", "matmul"}
ROOT = Path(__file__).resolve().parents[2]


def follow_orders(world: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Answers of a rank process of the doctor to its two orders."""
    from hlat.launch.preflight.rank_program import alone, together  # noqa: PLC0415

    rank = int(os.environ.get("RANK", "0"))
    order = {"device": "neuron", "rank": rank, "local_rank": rank, "nproc": world, "world": world, "folder": "."}
    order |= {"environment": {}, "groups": {"all ranks": [list(range(world))]} if world > 1 else {}}
    answers: tuple[list[dict[str, Any]], list[dict[str, Any]]] = [], []
    alone(order | {"modules": modules_of("rank")}, answers[0].append)
    together(order | {"modules": [], "rank_modules": modules_of("rank")}, answers[1].append)
    return answers


def measured(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Facts by module."""
    return {each["module"]: each["facts"] for each in answers if "module" in each}


def test_processes_that_join_measure_their_devices_afterwards() -> None:
    secret = {"HLAT_RUN_SECRET": "0" * 64}
    for alone, together in on_neuron(follow_orders, 2, world=2, env=secret):
        assert set(measured(alone)) == {"software"}
        assert set(measured(together)) == OF_DEVICE, together
        assert measured(together)["matmul"]["wrong"] is None and measured(together)["memory"]["joined"]


def test_a_single_process_measures_at_once() -> None:
    ((alone, together),) = on_neuron(follow_orders, 1)
    assert set(measured(alone)) == OF_DEVICE | {"software"}
    assert not measured(together)


@pytest.mark.slow
def test_the_examination_of_a_host_finds_its_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (build(), ROOT))))
    report = run_preflight(make_request(None, (), PreflightOptions(nproc=2, nodes=1, run_dir=tmp_path)))
    assert {finding.name for finding in report.findings} <= {"matmul-rate"}, "it computes as a CPU does"
    assert any("neuron (trn2.48xlarge)" in line for line in report.measured), report.measured
