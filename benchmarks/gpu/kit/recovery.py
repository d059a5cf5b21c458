"""Recovery: SIGKILL while the saver writes, memory of the GPU while the saver lives, and a bitwise resume.

undisturbed run ---------------------------------------------> metrics, final state
the same, save slowed down --SIGKILL--> saver still writes: nvidia-smi --resume--> the same metrics and state
"""

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import hlat
from kit import nvidia_smi
from kit.child import Context
from kit.environment import ROOT
from kit.processes import Started, descendants
from kit.shapes import LENGTHS, MODELS
from kit.training import folder

_STEPS, _EVERY = 18, 6
_SLOW_SECONDS = 2.0  # pause before each file of the save, in which it is found being written
_RUN_LIMIT = 3600.0  # the step's own limit comes first; nothing here depends on the speed of the machine
_OBSERVED = (0.5, 1.5, 3.0)  # seconds after the kill at which nvidia-smi is asked
_PROGRAM = "import sys, hlat; hlat.train(sys.argv[1], sys.argv[2:], allow_faults=True)"
_CLOCK = ("seconds", "tokens_per_second", "mfu", "memory_bytes")  # beginnings of metrics that depend on the clock


def recipe_text(tiny: bool, device: str, work: Path) -> str:
    """Return the recipe of the runs, as JSON, which is YAML: a model of 33 M parameters on the text of docs/."""
    import json

    sizes = {**MODELS["33m"], **({"layers": 2, "hidden_size": 64, "intermediate_size": 96} if tiny else {})}
    sizes["vocab_size"] = 320 if tiny else MODELS["33m"]["vocab_size"]
    length = 32 if tiny else LENGTHS["33m"]
    content = {
        "run": {
            "name": "recovery",
            "device": device,
            "deterministic": True,  # auto is false where attention would be slower, and promises no bits
            "compile": "none",
            "compile_cache": str(work / "compiled"),
        },
        "model": sizes,
        "data": {
            "path": "docs/*.md",  # relative to the repository, where a carried copy finds the same text
            "sequence_length": length,
            "tokenizer": {"train": "bpe", "vocab_size": sizes["vocab_size"]},
            "validation": {"by": "tail"},  # by document, none of these few pages may be chosen, whatever they say
        },
        "batch": {"global_batch": 8, "micro_batch": 4},
        "training": {"steps": _STEPS, "log_every": 1},
        "checkpoint": {"every_steps": _EVERY, "keep_last": 3},
        "evaluation": {"every_steps": _STEPS, "sequences": 8},
        "tracking": {"tensorboard": False, "console": "plain"},
    }
    return json.dumps(content)


def prepare(recipe: Path, target: Path) -> None:
    """Prepare the tokens of the recipe in a folder; to be called in the repository."""
    from hlat.data import prepare_recipe_data

    prepare_recipe_data(hlat.load_recipe(recipe, [f"data.prepared_dir={target}"]), workers=1)


def run(context: Context) -> None:
    """Train undisturbed, then with a kill, and compare."""
    os.chdir(ROOT)
    base = folder(context.work, "recovery")
    recipe = base / "recipe.yaml"
    recipe.write_text(recipe_text(context.tiny, context.device, context.work))
    with context.part("tokens"):
        tokens(context, recipe, base / "data")
    with context.part("undisturbed run"):
        started = _start(base, recipe, "undisturbed")
        context.check(
            "the undisturbed run ends", not (problem := started.wait(_RUN_LIMIT)), f"{problem} {started.tail()}"
        )
        context.found({"saves": _saves(base / "undisturbed")})
    with context.part("killed run"):
        killed(context, base, recipe)
    with context.part("resumed run"):
        started = _start(base, recipe, "killed", _fault())
        context.check("the resumed run ends", not (problem := started.wait(_RUN_LIMIT)), f"{problem} {started.tail()}")
        compare(context, base / "killed", base / "undisturbed")


def tokens(context: Context, recipe: Path, target: Path) -> None:
    """Use the carried tokens if they are those of this recipe, else prepare them."""
    carried = None if context.carried is None else context.carried / "data"
    if carried is not None and carried.is_dir() and not context.tiny:
        try:
            shutil.copytree(carried, target)
            prepare(recipe, target)
            context.found({"tokens": "carried"})
            return
        except hlat.HlatError as error:
            context.found({"carried tokens refused": str(error)[:500]})
            shutil.rmtree(target, ignore_errors=True)
    prepare(recipe, target)
    context.found({"tokens": "prepared here"})


def _fault() -> str:
    """Return the override that makes the second save slow, so that the kill meets it."""
    return f"faults=[{{kind: slow_disk, at_step: {2 * _EVERY}, seconds: {_SLOW_SECONDS}}}]"


def _start(base: Path, recipe: Path, name: str, *overrides: str) -> Started:
    """Start a run in a process that trains itself, without a supervisor that would restart it."""
    words = [f"run.dir={base / name}", f"data.prepared_dir={base / 'data'}", *overrides]
    command = [sys.executable, "-c", _PROGRAM, str(recipe), *words]
    return Started(command, base / f"{name}-{time.monotonic_ns()}.txt", os.environ, ROOT)


def killed(context: Context, base: Path, recipe: Path) -> None:
    """Kill the rank while its second save is written; ask for the memory of the GPU before, while and after."""
    before = nvidia_smi.used_mib()
    started = _start(base, recipe, "killed", _fault())
    until = time.monotonic() + _RUN_LIMIT
    while not _is_writing(base / "killed", 2 * _EVERY) and not started.has_ended() and time.monotonic() < until:
        time.sleep(0.01)
    helpers = descendants(started.pid)
    _signal(helpers, signal.SIGSTOP)  # the save stays as it is, however slow this machine is
    was_writing = _is_writing(base / "killed", 2 * _EVERY) and not started.has_ended()
    training = nvidia_smi.used_mib()
    _signal({started.pid}, signal.SIGKILL)
    context.check("the rank was killed during a save", was_writing, started.tail())
    began, seen = time.monotonic(), []
    for moment in _OBSERVED:
        time.sleep(max(0.0, began + moment - time.monotonic()))
        alive = sorted(pid for pid in helpers if _is_alive(pid))
        seen.append({"seconds": moment, "used_mib": nvidia_smi.used_mib(), "helpers alive": len(alive)} | _open(alive))
    users = nvidia_smi.users()
    _signal(helpers, signal.SIGCONT)
    while any(map(_is_alive, helpers)) and time.monotonic() < began + _RUN_LIMIT:
        time.sleep(0.1)
    after = nvidia_smi.used_mib()
    lingering = [each["used_mib"] for each in seen if each["helpers alive"] and each["used_mib"] is not None]
    retained = None if before is None or not lingering else lingering[-1] - before
    context.found(
        {
            "memory: before, training, after": [before, training, after],
            "memory after the kill": seen,
            "retained_mib": retained,
            "users after the kill": users,
            "seconds until the saver ended": time.monotonic() - began,
        }
    )
    context.check("the saver outlives its rank", seen[0]["helpers alive"] > 0, seen)
    # A driver's state that was copied by a fork keeps the memory of the GPU, as long as its files are open.
    context.check("the saver holds no file of the device", not any(each["device files"] for each in seen), seen)


def _is_writing(run: Path, step: int) -> bool:
    """Return True while the save of a step has a folder and is not committed."""
    try:
        folders = [each for each in (run / "checkpoints").iterdir() if str(step) in each.name]
    except OSError:
        return False
    return bool(folders) and not any((each / "COMMITTED").exists() for each in folders)


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _open(pids: list[int]) -> dict[str, list[str]]:
    """Return the device files that processes have open."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    found.add(str(entry.readlink()))
    return {"device files": sorted(path for path in found if path.startswith("/dev/nvidia"))}


def _saves(run: Path) -> list[dict[str, Any]]:
    """Return the events of a run about its saves, with their seconds."""
    import json

    events = []
    with suppress(OSError, ValueError):
        for line in (run / "events.jsonl").read_text().splitlines():
            event = json.loads(line)
            if "save" in str(event.get("event")) or "checkpoint" in str(event.get("event")):
                events.append(event)
    return events[:10]


def compare(context: Context, run: Path, undisturbed: Path) -> None:
    """Compare metrics of every step, and weights and optimizer state of the last one, bit by bit."""
    import torch

    from hlat.checkpoint.protocol.reader import open_checkpoint, resolve

    ours, theirs = (
        [
            {key: value for key, value in row.items() if not key.startswith(_CLOCK)}
            for row in hlat.metrics(each).to_pylist()
        ]
        for each in (run, undisturbed)
    )
    different = [row["step"] for row, other in zip(ours, theirs, strict=False) if row != other]
    context.check("metrics of every step are those of the undisturbed run", ours == theirs, different)
    state, expected = (open_checkpoint(resolve(each)).load("") for each in (run, undisturbed))
    wrong = [name for name in expected if name not in state or not torch.equal(state[name], expected[name])]
    context.found({"steps compared": len(theirs), "tensors compared": len(expected)})
    context.check("the final state has the bits of the undisturbed run", not wrong and len(expected) > 0, wrong[:5])
