"""Runs whose metrics and health are asked for while they train, die, restart and stop."""

import json
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hlat.runtime.json_lines import FIELDS
from hlat.runtime.process import REQUEUE_CODE
from tests.support.commands import StartedCommand
from tests.support.launch.launching import wait_until
from tests.support.launch.metrics_lint import parse

LONG = ("training.steps=1000000", "checkpoint.every_steps=20", "evaluation.every_steps=1000000")
SERVED = ("tracking.prometheus.port=0", "tracking.tensorboard=false")


class Served:
    """A command that trains and serves its metrics."""

    def __init__(self, *arguments: str | Path) -> None:
        self.command = StartedCommand("train", *arguments)
        self.lines: list[str] = []
        while not (found := re.search(r"metrics: (http://\S+)/metrics", self.read())):
            pass
        self.url = found[1]

    def read(self) -> str:
        line = self.command.stdout.readline()
        assert line, "".join(self.lines)
        self.lines.append(line)
        return line

    def get(self, path: str) -> tuple[int, str]:
        """Return the status and the text of an answer."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=600) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def series(self) -> dict[str, float]:
        """Series by name; of several with labels, the first."""
        found: dict[str, float] = {}
        for (name, _), value in parse(self.get("/metrics")[1]).items():
            found.setdefault(name, value)
        return found

    def wait(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds; the run must be healthy meanwhile."""
        deadline = time.monotonic() + 600
        while not condition():
            assert time.monotonic() < deadline and self.command.poll() is None, "".join(self.lines)
            assert self.get("/healthz")[0] == 200
            time.sleep(0.1)

    def stop(self) -> int:
        """Ask the run to save and stop; return its exit code, once all of its output has been read."""
        self.command.send_signal(signal.SIGTERM)
        self.lines += self.command.communicate()[0].splitlines(keepends=True)
        return self.command.wait()


def is_training(served: Served) -> bool:
    return served.get("/readyz")[0] == 200


def test_a_run_is_served_through_a_restart_and_every_line_is_json(recipe_file, tiny, tmp_path) -> None:
    options = ("tracking.console=json", "recovery.backoff_seconds=0.05")
    run = Served(recipe_file, *tiny, *LONG, *SERVED, *options)
    try:
        run.wait(lambda: is_training(run))
        run.wait(lambda: "hlat_checkpoint_age_seconds" in run.series())
        before = run.series()
        assert (before["hlat_processes"], before["hlat_restarts_total"], before["hlat_healthy"]) == (1, 0, 1)
        (worker,) = (
            child
            for child in psutil.Process(run.command.pid).children()
            if not re.search("json_lines|metrics_server", " ".join(child.cmdline()))
        )
        killed = time.monotonic()
        worker.kill()
        run.wait(lambda: run.series()["hlat_restarts_total"] == 1)
        run.wait(lambda: is_training(run) and run.series()["hlat_step"] > before["hlat_step"])
        after = run.series()
        logged = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
        assert after["hlat_loss"] in {line["loss"] for line in logged}
        assert 0 < after["hlat_goodput_ratio"] < 1
        assert 0 <= after["hlat_heartbeat_age_seconds"] < time.monotonic() - killed, "of the process that lives"
        assert after["hlat_durable_step"] >= 20 and after["hlat_target_steps"] == 1_000_000
        assert run.get("/other")[0] == 404
        helpers = psutil.Process(run.command.pid).children(recursive=True)
        assert run.stop() == REQUEUE_CODE
        psutil.wait_procs(helpers, timeout=600)
        assert not any(helper.is_running() for helper in helpers)
        with pytest.raises(OSError):
            run.get("/healthz")
    finally:
        run.command.kill()
    records = [json.loads(line) for line in run.lines]
    assert all(tuple(record) == FIELDS for record in records)
    events = [record["event"] for record in records]
    assert {"start", "step", "checkpoint", "incident", "restart", "resume", "end", "goodput"} <= set(events)
    (incident,) = (record for record in records if record["event"] == "incident")
    assert (incident["rank"], incident["level"], incident["values"]["cause"]) == (0, "error", "SIGKILL")
    said = [record for record in records if record["event"] == "message"]
    values = {name: value for record in said for name, value in record["values"].items()}
    assert (values["parameters"], values["steps"], values["precision"]) == (45216, 1000000, "fp32"), values
    for record in said:
        if record["message"].startswith("warning: "):
            assert record["level"] == "warning", record
    kept = [json.loads(line)["event"] for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [event for event in events if event not in ("step", "message", "output")] == kept


def test_a_process_without_a_supervisor_serves_its_own_state(recipe_file, tiny) -> None:
    run = Served(recipe_file, *tiny, *LONG, *SERVED, "--no-supervisor")
    try:
        run.wait(lambda: is_training(run) and "hlat_loss" in run.series())
        found = run.series()
        assert found["hlat_processes"] == 1 and found["hlat_step"] >= found["hlat_logged_step"] > 0
        assert json.loads(run.get("/healthz")[1])["reason"] == "training"
        psutil.Process(run.command.pid).suspend()  # each of its threads stops at its own next moment
        wait_until(lambda: run.get("/healthz")[0] == 503)
        psutil.Process(run.command.pid).resume()
        wait_until(lambda: run.get("/healthz")[0] == 200)
        assert run.stop() == REQUEUE_CODE
    finally:
        run.command.kill()


def test_a_port_in_use_and_an_address_of_another_machine_are_refused_before_anything_starts(
    cli, recipe_file, tiny, tmp_path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        done = cli("train", recipe_file, *tiny, f"tracking.prometheus.port={other.getsockname()[1]}")
    assert done.returncode == 2 and "another program listens there" in done.stderr, done.stderr
    done = cli("train", recipe_file, *tiny, "tracking.prometheus.address=203.0.113.7")
    assert done.returncode == 2 and "this machine has no such address" in done.stderr, done.stderr
    done = cli("train", recipe_file, *tiny, "tracking.prometheus.address=nowhere", "tracking.prometheus.port=70000")
    assert done.returncode == 2 and "prometheus.address" in done.stderr and "70000" in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()
