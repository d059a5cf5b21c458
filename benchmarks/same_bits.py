"""Compare two checkouts bit for bit: losses of every step and the hash of the final weights of the same runs.

    recipe + overrides -> hlat train (checkout A), hlat train (checkout B) -> metrics.jsonl, exported weights -> equal?
    run begun with A -> resumed with B -> the weights of the run that A alone finished?

Only the command line is used, so the two checkouts may differ in every module. Both run on this machine with one OpenMP
thread per process, from the same text.

    python benchmarks/same_bits.py CHECKOUT_A CHECKOUT_B [--text FOLDER] [--only NAME ...] [--set a.b=c ...]

Exit code 1 where anything differs. ``--set optimizer.clip_norm=null`` is needed against checkouts before gradient norms
became independent of the layout (November 2026): clipped runs end with other last bits since then.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from results import Recorder

SMALL = (
    "model.vocab_size=320",
    "model.layers=4",
    "model.hidden_size=32",
    "model.intermediate_size=96",
    "model.heads=8",
    "model.kv_heads=4",
    "data.sequence_length=32",
    "data.tokenizer={train: bpe, vocab_size: 320}",
    "batch={global_batch: 8, micro_batch: 2}",
    "training={steps: 6, log_every: 1, seed: 3}",
    "evaluation.every_steps=null",
    "evaluation.sequences=8",
    "data.validation={fraction: 0.1, by: document}",
    "checkpoint.every_steps=3",
    "run.name=small",
    "schedule.warmup_steps=1",
)


@dataclass(frozen=True)
class Case:
    """A run of ``hlat train``.

    Attributes:
        name: its name in the table.
        recipe: recipe that it starts from.
        overrides: further ``a.b=c``.
        processes: world size.
        resumed: checkout A trains half of the steps, checkout B the rest.
    """

    name: str
    recipe: str
    overrides: tuple[str, ...]
    processes: int = 1
    resumed: bool = False


def _layout(name: str, processes: int, parallel: str, *more: str) -> Case:
    return Case(name, "quickstart", (*SMALL, f"parallel={{{parallel}}}", *more), processes)


CASES = (
    Case("quickstart, 60 steps", "quickstart", ("training.steps=60", "training.log_every=1")),
    Case("tiny-shakespeare, 200 steps", "tiny-shakespeare", ("training.steps=200", "training.log_every=1")),
    _layout("TP2", 2, "tensor: 2"),
    _layout("TP2, no sequence parallelism", 2, "tensor: 2, sequence: false"),
    _layout("PP2 1F1B", 2, "pipeline: 2"),
    _layout("PP2 interleaved 1F1B", 2, "pipeline: 2, schedule: interleaved-1f1b"),
    _layout("PP2 ZBV", 2, "pipeline: 2, schedule: zbv"),
    _layout("CP2", 2, "context: 2"),
    _layout("DP2, ZeRO 0", 2, "zero: 0"),
    _layout("DP2, ZeRO 1", 2, "zero: 1"),
    _layout("DP2, ZeRO 2", 2, "zero: 2"),
    _layout("DP2, ZeRO 3", 2, "zero: 3"),
    _layout("TP2 x PP2", 4, "tensor: 2, pipeline: 2"),
    _layout("TP2 x DP2, ZeRO 1", 4, "tensor: 2, zero: 1"),
    _layout("selective recomputation", 1, "", "memory.activation_checkpointing=selective"),
    _layout("mixed", 1, "", "precision.mode=mixed"),
    _layout("bf16-sr", 1, "", "precision.mode=bf16-sr"),
    _layout("bf16-sr, TP2", 2, "tensor: 2", "precision.mode=bf16-sr"),
    _layout("online data", 1, "", "data.mode=online"),
    _layout("online data, DP2", 2, "zero: 1", "data.mode=online"),
    _layout("HLAT 7B's layout (TP, DP, ZeRO 1)", 4, "tensor: 2, zero: 1", "precision.mode=bf16-sr", "model.kv_heads=8"),
    _layout("HLAT 70B's layout (TP over kv heads, PP)", 8, "tensor: 4, pipeline: 2", "model.kv_heads=2"),
    Case("resumed: prepared data", "quickstart", SMALL, resumed=True),
    Case("resumed: online data", "quickstart", (*SMALL, "data.mode=online"), resumed=True),
    Case("resumed: DP2, ZeRO 3", "quickstart", (*SMALL, "parallel={zero: 3}"), 2, resumed=True),
    Case("resumed: bf16-sr", "quickstart", (*SMALL, "precision.mode=bf16-sr"), resumed=True),
)


def hlat(checkout: Path, *arguments: str) -> None:
    """Run a command of hlat from a checkout.

    Raises:
        RuntimeError: it failed; with what it printed.
    """
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hlat", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{checkout}: {' '.join(arguments)}\n{done.stdout}{done.stderr}")


def train(checkout: Path, case: Case, run_dir: Path, text: Path, *more: str) -> None:
    """Train a case in a folder, or resume it there."""
    data = "../shared/data/text/tinyshakespeare.txt" if case.recipe == "tiny-shakespeare" else str(text)
    defaults = (
        f"data.path={data}",
        "precision.mode=fp32",
        "run.compile=none",
        "tracking={console: none, tensorboard: false}",
    )
    processes = ("--nproc", str(case.processes)) if case.processes > 1 else ()
    hlat(checkout, "train", case.recipe, *processes, *defaults, *case.overrides, f"run.dir={run_dir}", *more)


def outcome(checkout: Path, run_dir: Path) -> tuple[list[float], str]:
    """Losses of the logged steps, and a hash of the exported weights, of a finished run."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    model = run_dir / "exported"
    hlat(checkout, "export", str(run_dir), "--to", str(model))
    digest = hashlib.sha256()
    for file in sorted(model.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return [row["loss"] for row in rows if "loss" in row], digest.hexdigest()


def compare(case: Case, old: Path, new: Path, folder: Path, text: Path, more: list[str]) -> bool:
    """Run a case with both checkouts, print a line of the table, and return True if all bits are equal."""
    train(old, case, folder / "old", text, *more)
    if case.resumed:
        train(old, case, folder / "new", text, *more, "training.stop_after=3")
    train(new, case, folder / "new", text, *more)
    (losses, weights), (new_losses, new_weights) = outcome(old, folder / "old"), outcome(new, folder / "new")
    equal = losses == new_losses and weights == new_weights
    verdict = "equal" if equal else f"DIFFERENT: losses {losses[-1]!r} and {new_losses[-1]!r}"
    print(
        f"| {case.name} | {case.processes} | {len(losses)} | {losses[-1]:.6f} | {weights[:12]} | {verdict} |",
        flush=True,
    )
    return equal


def main() -> int:
    """Compare all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument(
        "--text", type=Path, help="text files; the encodings package of this Python's library if not given"
    )
    parser.add_argument("--only", nargs="+", help="cases whose names contain one of these")
    parser.add_argument("--set", nargs="+", default=[], metavar="a.b=c", help="overrides for all cases")
    options, record = parser.parse_args(), Recorder(__file__, "same-bits.md")
    text = options.text or Path(sysconfig.get_path("stdlib")) / "encodings" / "*.py"
    cases = [case for case in CASES if not options.only or any(word in case.name for word in options.only)]
    print("| run | processes | steps | final loss | weights | bits |\n|---|---|---|---|---|---|")
    equal = 0
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            equal += compare(case, options.old.resolve(), options.new.resolve(), Path(folder), text, options.set)
    note = " ".join(options.set) or None
    claim = f"runs equal bit for bit between two checkouts, {options.old.name} and {options.new.name}"
    record.add(claim, "runs", equal, peer="all runs compared", peer_values=len(cases), note=note)
    record.write()
    return 0 if equal == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
