"""A rollback waits for the pending save, which may be the newest good state."""

import io
from pathlib import Path

import pytest
import yaml

from hlat.config.load import parse_recipe
from hlat.training import loop, run


def test_the_pending_save_ends_before_a_rollback(
    tiny_recipe: str, corpus: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = yaml.safe_load(tiny_recipe)
    content["run"]["dir"] = str(tmp_path / "run")
    content["data"] |= {"path": str(corpus), "prepared_dir": str(prepared)}
    content["training"] |= {"steps": 18, "log_every": 1}
    content["checkpoint"] |= {"every_steps": 6}
    content["anomalies"] = {"window": 8, "spike": "rollback"}
    content["tracking"] = {"tensorboard": False, "console": "plain"}
    content["faults"] = [{"kind": "spike", "at_step": 15}]
    calls: list[str] = []
    wait, roll_back, report = loop.Checkpointer.wait_for_save, loop.roll_back, loop.report_anomaly

    def recorded(name: str, function):
        def call(*arguments, **more):
            calls.append(name)
            return function(*arguments, **more)

        return call

    monkeypatch.setattr(loop.Checkpointer, "wait_for_save", recorded("wait", wait))
    monkeypatch.setattr(loop, "roll_back", recorded("roll back", roll_back))
    monkeypatch.setattr(loop, "report_anomaly", recorded("report", report))
    run(parse_recipe(content), stream=io.StringIO(), allow_faults=True)
    assert "roll back" in calls
    at = calls.index("roll back")
    assert calls[at - 2 : at] == ["wait", "report"], "the save is waited for before the rollback is reported"
    before_spike = calls[: at - 2]
    assert before_spike.count("report") == 14
