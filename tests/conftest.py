"""Fixtures of all tests: a small corpus, a small recipe, and the folder of measured texts."""

import os
import random
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, settings

from hlat.config import DataConfig
from hlat.data.prepare.preparation import prepare
from hlat.runtime.backend import torch_private
from tests.support.commands import hlat
from tests.support.slow_cases import SLOW_CASES, UNKNOWN, read_slow_cases, slow_names, unknown_names

# One thread: the machine's cores are shared, and results must not depend on how many there are.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The tests start hundreds of interpreters. Where the environment forbids bytecode, as images often do, each of them
# would compile hlat anew, a third of its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Tests started in the background, or through nohup, inherit that these signals are ignored, and so do processes that
# they start: tests of Ctrl-C and of a terminal that hangs up would wait for ever.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# How long drawing an example takes says something about the machine, not about the law: no test here is timed.
# CI draws the same examples each time, so that what lands was tested with what it is tested with next.
settings.register_profile(
    "hlat", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=bool(os.environ.get("CI"))
)
settings.load_profile("hlat")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that tests/slow_cases.txt names as slow."""
    cases = read_slow_cases(SLOW_CASES.read_text(encoding="utf-8"))
    complete = not any("::" in argument for argument in config.args)
    config.stash[UNKNOWN] = unknown_names((item.nodeid for item in items), cases) if complete else []
    for item in items:
        if slow_names(item.nodeid, cases):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    """Skip a test that needs a schedule which this release of PyTorch computes wrongly: hlat refuses it."""
    try:
        return (yield)
    except Exception as error:
        reason = torch_private.split_backward_problem()
        if reason and reason in str(error):
            pytest.skip(reason)
        raise


SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of measured texts beside the checkout; tests that need them are skipped where it is not."""
    if not SHARED.is_dir():
        pytest.skip("the folder ../shared with texts and tokenizers is not here")
    return SHARED


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 documents of made-up sentences: enough structure for a loss to fall, 60 KB."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    nouns, verbs = ["cat", "river", "engine", "wörd", "tree", "sailor"], ["sees", "builds", "loses", "remembers"]
    for number in range(60):
        lines = (f"the {rng.choice(nouns)} {rng.choice(verbs)} a {rng.choice(nouns)}." for _ in range(45))
        (folder / f"{number:03d}.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def tiny(corpus: Path, tmp_path: Path) -> list[str]:
    """Overrides that make any recipe file a run of a second or two in tmp_path/run."""
    return [
        f"data.path={corpus}",
        f"run.dir={tmp_path / 'run'}",
        "tracking.console=plain",
    ]


@pytest.fixture
def quick(tiny: list[str], prepared: Path) -> list[str]:
    """``tiny``, with the data of ``prepared``: for recipes whose data section is that of ``tiny_recipe``."""
    return [*tiny, f"data.prepared_dir={prepared}"]


TINY_RECIPE = """
run: {name: tiny}
model: {vocab_size: 320, layers: 2, hidden_size: 32, intermediate_size: 96, heads: 4, kv_heads: 2}
data:
  sequence_length: 32
  tokenizer: {vocab_size: 320}
  validation: {fraction: 0.1}
batch: {global_batch: 8, micro_batch: 4}
optimizer: {lr: 3.0e-3}
schedule: {warmup_steps: 5}
training: {steps: 40, log_every: 5, seed: 3}
checkpoint: {every_steps: 10, keep_last: 2}
evaluation: {every_steps: 20, sequences: 8}
precision: {mode: fp32}
"""


@pytest.fixture(scope="session")
def tiny_recipe() -> str:
    """The text of a recipe of a two-layer model, without a corpus."""
    return TINY_RECIPE


@pytest.fixture
def recipe_file(tiny_recipe: str, tmp_path: Path) -> Path:
    """The tiny recipe as a file."""
    path = tmp_path / "recipe.yaml"
    path.write_text(tiny_recipe)
    return path


@pytest.fixture(scope="session")
def prepared(tiny_recipe: str, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data of the tiny recipe, made once: a third of the time of a short run. Tests must not change it."""
    folder = tmp_path_factory.mktemp("prepared") / "data"
    data = {**yaml.safe_load(tiny_recipe)["data"], "path": str(corpus)}
    prepare(DataConfig.model_validate(data), folder, workers=1)
    return folder


@pytest.fixture(scope="session")
def finished(tiny_recipe: str, corpus: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny recipe's undisturbed run of 40 steps, made once. Tests copy it; they must not change it."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "recipe.yaml").write_text(tiny_recipe)
    places = (f"run.dir={folder / 'run'}", f"data.path={corpus}", f"data.prepared_dir={prepared}")
    done = hlat("train", folder / "recipe.yaml", *places)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture(scope="session")
def cli():
    """The command ``hlat`` as a function: arguments in, completed process out."""
    return hlat
