"""Whatever happens to a file of a run folder, every verb gives the right result or a message, without a traceback.

    a run of 4 steps of 6, one file damaged --> 12 verbs, each in a process --> exit code, output, weights

The witness is the run that nothing happened to: its final weights, and what the verbs print of it. A verb that ends
well has to give the same, or to say on standard error or in its output that it took another checkpoint.
"""

import os
import random
import re
import shutil
import subprocess
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from hlat.checkpoint.protocol import open_checkpoint, resolve
from tests.support.commands import hlat
from tests.support.fuzz.mutations import mutate

RECIPE = """
run: {name: fuzzed}
model: {vocab_size: 300, layers: 1, hidden_size: 16, intermediate_size: 32, heads: 2}
data:
  sequence_length: 16
  tokenizer: {vocab_size: 300}
  validation: {fraction: 0.1}
batch: {global_batch: 4, micro_batch: 4}
schedule: {warmup_steps: 1}
training: {steps: 6, log_every: 1}
checkpoint: {every_steps: 2, keep_last: 3}
evaluation: {every_steps: 3, sequences: 4}
"""
SECONDS = 120  # the law says 30 on a machine of one's own
OK = {0, 2, 3, 4, 5}  # what is documented; a traceback ends with 1
SLOW_MUTATIONS = int(os.environ.get("HLAT_FUZZ_MUTATIONS", "170"))  # times 12 verbs
SEED = int(os.environ.get("HLAT_FUZZ_SEED", "0"))


@dataclass(frozen=True)
class Undisturbed:
    """A run that was interrupted, and what came of it when nothing happened to it."""

    folder: Path
    words: list[str]  # the recipe and its overrides
    weights: str
    printed: dict[str, str]


def weights_of(run: Path) -> str:
    """A hash of the weights of the newest whole checkpoint."""
    checkpoint = open_checkpoint(resolve(run))
    digest = sha256(str(checkpoint.step).encode())
    for name, tensor in sorted(checkpoint.load("model.").items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def exported(folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest() if files else "nothing"


def verbs(run: Path, out: Path) -> dict[str, list[Any]]:
    """Those that change nothing; ``prune`` comes after them, and ``train`` has a copy of its own."""
    return {
        "verify": ["checkpoint", "verify", run],
        "list": ["checkpoint", "list", run],
        "list json": ["checkpoint", "list", run, "--json"],
        "show": ["checkpoint", "show", run],
        "show json": ["checkpoint", "show", run, "--json"],
        "evaluate": ["evaluate", run],
        "generate": ["generate", run, "--prompt", "the", "--max-tokens", "4"],
        "export": ["export", run, "--to", out],
        "data show": ["data", "show", run / "data"],
        "data verify": ["data", "verify", run / "data"],
        "prune": ["checkpoint", "prune", run, "--keep-last", "1"],
    }


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "recipe.yaml").write_text(RECIPE)
    words = [str(folder / "recipe.yaml"), f"data.path={corpus}", "tracking.console=plain"]
    done = hlat("train", *words, f"run.dir={folder / 'run'}", "training.stop_after=4")
    assert done.returncode == 0, done.stderr
    printed = {}
    for name, arguments in verbs(folder / "run", folder / "hf").items():
        if name != "prune":
            done = hlat(*arguments)
            assert done.returncode == 0, (name, done.stderr)
            printed[name] = plain(done.stdout)
    printed["export"] = exported(folder / "hf")
    shutil.copytree(folder / "run", folder / "on", symlinks=True)
    done = hlat("train", *words, f"run.dir={folder / 'on'}")
    assert done.returncode == 0, done.stderr
    return Undisturbed(folder / "run", words, weights_of(folder / "on"), printed)


def plain(text: str) -> str:
    """What is printed, without what differs from one time to the next."""
    return re.sub(r"/\S*/|[\d.]+ GB/s", "", text)


def run_verbs(undisturbed: Undisturbed, scratch: Path, seed: int, chosen: int | None = None) -> list[str]:
    """Damage a copy of the run, and try verbs on it, all or some; returns what broke the law."""
    rng = random.Random(seed)
    run = scratch / "run"
    shutil.copytree(undisturbed.folder, run, symlinks=True)
    happened = f"seed {seed}: {mutate(run, rng)}"
    on = scratch / "on"
    shutil.copytree(run, on, symlinks=True)
    cases = verbs(run, scratch / "hf") | {"train": ["train", *undisturbed.words, f"run.dir={on}"]}
    names = list(cases) if chosen is None else sorted(rng.sample(sorted(cases), chosen))
    broken = []
    for name in names:
        try:
            done = hlat(*cases[name], timeout=SECONDS)
        except subprocess.TimeoutExpired:
            broken.append(f"{happened}: {name}: did not end in {SECONDS} s")
            continue
        if problem := wrong(name, done, undisturbed, scratch):
            broken.append(f"{happened}: {name}: {problem}")
    shutil.rmtree(scratch)
    return broken


def wrong(name: str, done: "subprocess.CompletedProcess[str]", undisturbed: Undisturbed, scratch: Path) -> str:
    """What is wrong with how a verb ended; empty where nothing is."""
    if "Traceback" in done.stderr + done.stdout or done.returncode not in OK:
        return f"exit {done.returncode}: {done.stderr[-1500:]}"
    if done.returncode != 0:
        return "" if done.stderr.strip() else f"exit {done.returncode} without a word"
    if name == "train":
        return "" if weights_of(scratch / "on") == undisturbed.weights else f"other weights: {done.stdout[-1500:]}"
    if name in ("evaluate", "generate", "export"):
        found = exported(scratch / "hf") if name == "export" else plain(done.stdout)
        told = "damaged" in done.stderr
        return "" if told or found == undisturbed.printed[name] else f"other result, not a word: {done.stdout[-500:]}"
    return ""


@pytest.mark.parametrize("seed", range(12))
def test_some_damage(undisturbed: Undisturbed, tmp_path: Path, seed: int) -> None:
    broken = run_verbs(undisturbed, tmp_path / "scratch", 1000 + seed, chosen=5)
    assert not broken, "\n".join(broken)


@pytest.mark.slow
def test_much_damage(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """2,040 runs of verbs. HLAT_FUZZ_MUTATIONS and HLAT_FUZZ_SEED say how many, and which."""
    broken = []
    for number in range(SLOW_MUTATIONS):
        found = run_verbs(undisturbed, tmp_path / "scratch", SEED + number)
        print(f"{number + 1} of {SLOW_MUTATIONS} mutations", *found, sep="\n  ", flush=True)
        broken += found
    assert not broken, "\n".join(broken)
