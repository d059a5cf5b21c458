"""``hlat.train`` in a program: quiet, twice in one process, and with nothing left behind, after errors too."""

import gc
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

import hlat
import hlat.api  # its first import draws a number from Python's generator, in rich
from hlat.checkpoint.protocol.reader import verify_checkpoint
from hlat.runtime.errors import MissingHostsError, PersistentCorruptionError, error_class
from hlat.runtime.process import REQUEUE_CODE

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def process_settings() -> dict[str, Any]:
    """Everything of this process that a run could leave changed."""
    return {
        "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "signals": [signal.getsignal(number) for number in SIGNALS],
        "streams": (sys.stdout, sys.stderr),
        "deterministic": torch.get_deterministic_debug_mode(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "reduced": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "gradients": torch.is_grad_enabled(),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "random": (random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()),
        "group": dist.is_initialized(),
        "handlers": list(logging.getLogger().handlers),
        "folder": Path.cwd(),
    }


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Compare the process before and after each test, threads and child processes included."""
    random.seed(1)
    before, threads, children = process_settings(), set(threading.enumerate()), set(psutil.Process().children())
    yield
    after = process_settings()
    assert {name: value for name, value in after.items() if value != before[name]} == {}
    assert set(threading.enumerate()) <= threads
    assert set(psutil.Process().children()) <= children


@pytest.fixture
def overrides(corpus: Path, tmp_path: Path) -> dict[str, object]:
    return {"data.path": str(corpus), "run.dir": str(tmp_path / "run"), "training.steps": 10, "training.log_every": 5}


def test_a_run_prints_nothing_and_logs_its_progress(
    recipe_file: Path,
    overrides: dict[str, object],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    with caplog.at_level(logging.INFO, "hlat"):
        result = hlat.train(recipe_file, overrides)
    assert capfd.readouterr() == ("", ""), "neither Python nor a library printed"
    assert [line for line in caplog.messages if line.startswith("step 5/10")]
    assert {record.name.partition(".")[0] for record in caplog.records} == {"hlat"}
    assert (result.step, result.total_steps, result.reason, result.finished) == (10, 10, "finished", True)
    assert result.run_dir == tmp_path / "run" and result.checkpoint == tmp_path / "run/checkpoints/step-00000010"
    assert verify_checkpoint(result.checkpoint) == []
    last = hlat.metrics(result.run_dir).to_pylist()[-1]
    assert (result.loss, result.validation_loss) == (last["loss"], last["val_loss"])
    longer = overrides | {"training.steps": 20, "schedule.horizon_steps": 10}
    again = hlat.train(recipe_file, longer)  # resumes at step 10
    assert again.step == 20 and again.loss != result.loss
    assert again == hlat.train(hlat.load_recipe(recipe_file, longer)), "a finished run"


def test_a_run_in_a_thread_after_errors_in_the_same_process(
    recipe_file: Path, overrides: dict[str, object], tmp_path: Path
):
    with pytest.raises(hlat.RecipeError) as refused:
        hlat.train(recipe_file, {**overrides, "optimizer.lr": -1, "training.stepz": 3})
    assert [problem.path for problem in refused.value.problems] == ["optimizer.lr", "training.stepz"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(hlat.DataError):
        hlat.train(recipe_file, {**overrides, "data.path": str(tmp_path / "empty")})
    with pytest.raises(hlat.LaunchError, match="nproc 0"):
        hlat.train(recipe_file, overrides, nproc=0)
    with pytest.raises(hlat.LaunchError, match=r"hlat\.load_recipe"):
        hlat.train(hlat.load_recipe(recipe_file, overrides), {"training.steps": 3})
    results: list[hlat.TrainingResult] = []
    thread = threading.Thread(target=lambda: results.append(hlat.train(recipe_file, overrides)))
    thread.start()
    thread.join()
    assert results[0].finished


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_and_returns(recipe_file: Path, overrides: dict[str, object], number: signal.Signals):
    """The signal arrives in the first logged step, from which the progress is reported."""

    class Interrupt(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("step 5/"):
                os.kill(os.getpid(), number)

    logger, handler = logging.getLogger("hlat"), Interrupt()
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        result = hlat.train(recipe_file, overrides)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert result.reason == number.name and not result.finished and 5 <= result.step <= 6
    assert result.checkpoint is not None and verify_checkpoint(result.checkpoint) == []
    assert hlat.train(recipe_file, overrides).finished, "the same call goes on"


def test_two_processes_from_python(
    recipe_file: Path,
    overrides: dict[str, object],
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    # No rank of a busy machine is told to be slow: that is no output of the function.
    recipe = hlat.load_recipe(recipe_file, overrides | {"training.steps": 20, "recovery.slow_factor": 1e6})
    with caplog.at_level(logging.INFO, "hlat"):
        result = hlat.train(recipe, nproc=2)
    assert capfd.readouterr() == ("", "")
    assert [line for line in caplog.messages if line.startswith("step 20/20")]
    assert result.finished and result.reason == "finished" and result.validation_loss is not None
    assert result.checkpoint is not None and verify_checkpoint(result.checkpoint) == []
    assert result == hlat.train(recipe), "one process finds the run finished, with the same result"


@pytest.mark.slow
def test_two_hosts_from_python(recipe_file: Path, overrides: dict[str, object], tmp_path: Path):
    """The same call on each host, here in two programs; a failure is an error in both."""
    program = (
        "import json, sys, hlat\n"
        "try: print(hlat.train(sys.argv[1], json.loads(sys.argv[2]), nodes=2, node=1, address='127.0.0.1').reason)\n"
        "except hlat.HlatError as error: print(type(error).__name__)"
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    for changed in (overrides, overrides | {"data.path": str(empty), "run.dir": str(tmp_path / "failed")}):
        words = [sys.executable, "-c", program, str(recipe_file), json.dumps(changed, default=str)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as other:
            if changed is overrides:
                result = hlat.train(recipe_file, changed, nodes=2, node=0, address="127.0.0.1")
                assert result.finished and result.validation_loss is not None
            else:
                with pytest.raises(hlat.HlatError):
                    hlat.train(recipe_file, changed, nodes=2, node=0, address="127.0.0.1")
            printed = other.communicate()[0]
        assert printed == "finished\n" if changed is overrides else "Error" in printed


@pytest.mark.slow
def test_an_error_in_other_processes_has_its_class(recipe_file: Path, overrides: dict[str, object], tmp_path: Path):
    file = tmp_path / "broken.jsonl"
    lines = [f'{{"text": "document {number}"}}' for number in range(100_000)]
    file.write_text("\n".join([*lines, '{"text": ']))  # the damage is behind what is read before ranks start
    with pytest.raises(hlat.DataError, match="broken"):
        hlat.train(recipe_file, overrides | {"data.path": str(file)}, nproc=2)


def test_missing_hosts_end_with_the_code_that_schedulers_queue_again():
    assert MissingHostsError.exit_code == REQUEUE_CODE


def test_the_class_of_a_reported_error():
    assert error_class("PersistentCorruptionError", 4) is PersistentCorruptionError
    assert error_class("RecipeError", 2) is hlat.LaunchError  # its constructor takes problems, not a message
    assert [error_class("", code) for code in (1, 3, 4, 5)] == [
        *(hlat.LaunchError, hlat.StorageError, hlat.NumericsError, hlat.CorruptionError),
    ]


def test_importing_hlat_imports_nothing_heavy():
    program = (
        "import sys, hlat; assert 'hlat.api' not in sys.modules; hlat.train; "
        "print([name for name in ('torch', 'pyarrow', 'typer') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
