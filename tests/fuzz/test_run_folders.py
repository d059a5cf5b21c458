"""Whatever happens to a file of a run folder, every verb gives the correct result or a message, without a traceback.

    a run of 4 steps of 6, one file damaged --> 12 verbs, each in a process --> exit code, output, weights

The reference is an undamaged run: its final weights, and the output of the verbs. A verb that succeeds must give the
same result, or say in its output that it used another checkpoint.
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

from hlat.checkpoint.protocol.reader import open_checkpoint, resolve
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
SECONDS = 600  # the documented limit is 30 on an idle machine
OK = {0, 2, 3, 4, 5}  # documented exit codes; a traceback gives 1
SLOW_MUTATIONS = int(os.environ.get("HLAT_FUZZ_MUTATIONS", "170"))  # times 12 verbs
SEED = int(os.environ.get("HLAT_FUZZ_SEED", "0"))


@dataclass(frozen=True)
class Undisturbed:
    """A run that was interrupted, and its results without damage."""

    folder: Path
    arguments: list[str]  # the recipe and its overrides
    weights: str
    printed: dict[str, str]


def weights_of(run: Path) -> str:
    """Hash of the weights of the newest complete checkpoint."""
    checkpoint = open_checkpoint(resolve(run))
    digest = sha256(str(checkpoint.step).encode())
    for name, tensor in sorted(checkpoint.load("model.").items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def exported(folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest() if files else "nothing"


def verbs(run: Path, out: Path) -> dict[str, list[Any]]:
    """Verbs that change nothing; ``prune`` runs last, and ``train`` gets its own copy of the run."""
    return {
        "verify": ["checkpoint", "verify", run],
        "list": ["checkpoint", "list", run],
        "list json": ["checkpoint", "list", run, "--json"],
        "show": ["checkpoint", "show", run],
        "show json": ["checkpoint", "show", run, "--json"],
        "evaluate": ["evaluate", run, "--quiet"],  # no progress: a slow machine prints lines of it
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
    arguments = [str(folder / "recipe.yaml"), f"data.path={corpus}", "tracking.console=plain"]
    done = hlat("train", *arguments, f"run.dir={folder / 'run'}", "training.stop_after=4")
    assert done.returncode == 0, done.stderr
    printed = {}
    for name, verb_arguments in verbs(folder / "run", folder / "hf").items():
        if name != "prune":
            done = hlat(*verb_arguments)
            assert done.returncode == 0, (name, done.stderr)
            printed[name] = plain(done.stdout)
    printed["export"] = exported(folder / "hf")
    shutil.copytree(folder / "run", folder / "on", symlinks=True)
    done = hlat("train", *arguments, f"run.dir={folder / 'on'}")
    assert done.returncode == 0, done.stderr
    return Undisturbed(folder / "run", arguments, weights_of(folder / "on"), printed)


def plain(text: str) -> str:
    """Output without values that differ between calls."""
    return re.sub(r"/\S*/|[\d.]+ GB/s", "", text)


def run_verbs(undisturbed: Undisturbed, scratch: Path, seed: int, chosen: int | None = None) -> list[str]:
    """Damage a copy of the run, and run all or some verbs on it; return descriptions of violations."""
    rng = random.Random(seed)
    run = scratch / "run"
    shutil.copytree(undisturbed.folder, run, symlinks=True)
    damage = f"seed {seed}: {mutate(run, rng)}"
    resumed = scratch / "on"
    shutil.copytree(run, resumed, symlinks=True)
    cases = verbs(run, scratch / "hf") | {"train": ["train", *undisturbed.arguments, f"run.dir={resumed}"]}
    names = list(cases) if chosen is None else sorted(rng.sample(sorted(cases), chosen))
    broken = []
    for name in names:
        try:
            done = hlat(*cases[name], timeout=SECONDS)
        except subprocess.TimeoutExpired:
            broken.append(f"{damage}: {name}: did not end in {SECONDS} s")
            continue
        if problem := violation(name, done, undisturbed, scratch):
            broken.append(f"{damage}: {name}: {problem}")
    shutil.rmtree(scratch)
    return broken


def violation(name: str, done: "subprocess.CompletedProcess[str]", undisturbed: Undisturbed, scratch: Path) -> str:
    """Describe the violation by a verb; empty if there is none."""
    if "Traceback" in done.stderr + done.stdout or done.returncode not in OK:
        return f"exit {done.returncode}: {done.stderr[-1500:]}"
    if done.returncode != 0:
        return "" if done.stderr.strip() else f"exit {done.returncode} without a message"
    if name == "train":
        return "" if weights_of(scratch / "on") == undisturbed.weights else f"other weights: {done.stdout[-1500:]}"
    if name in ("evaluate", "generate", "export"):
        found = exported(scratch / "hf") if name == "export" else plain(done.stdout)
        reported = "damaged" in done.stderr
        return (
            ""
            if reported or found == undisturbed.printed[name]
            else f"other result without a message: {done.stdout[-500:]}"
        )
    return ""


@pytest.mark.parametrize("seed", range(12))
def test_a_few_damaged_files(undisturbed: Undisturbed, tmp_path: Path, seed: int) -> None:
    broken = run_verbs(undisturbed, tmp_path / "scratch", 1000 + seed, chosen=5)
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_flipped_bit_of_a_token_is_reported_and_not_trained_on(
    undisturbed: Undisturbed, tmp_path: Path, split: str
) -> None:
    """Found with seed 2000: another validation loss, without a message."""
    run = tmp_path / "run"
    shutil.copytree(undisturbed.folder, run, symlinks=True)
    shard = run / "data" / f"{split}-00000.bin"
    content = bytearray(shard.read_bytes())
    content[1942] ^= 1 << 4
    shard.write_bytes(content)
    calls = [["train", *undisturbed.arguments, f"run.dir={run}"]]
    calls += [["evaluate", run]] if split == "validation" else []
    for call in calls:
        done = hlat(*call)
        assert done.returncode == 2, done.stdout
        assert f"{split}-00000.bin: the checksum differs" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_many_damaged_files(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """2,040 calls of verbs; HLAT_FUZZ_MUTATIONS sets the number of damaged runs, and HLAT_FUZZ_SEED the first seed."""
    broken = []
    for number in range(SLOW_MUTATIONS):
        found = run_verbs(undisturbed, tmp_path / "scratch", SEED + number)
        print(f"{number + 1} of {SLOW_MUTATIONS} mutations", *found, sep="\n  ", flush=True)
        broken += found
    assert not broken, "\n".join(broken)
