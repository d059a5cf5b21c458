"""``hlat checkpoint``, ``fork``, ``import``, ``export`` and ``average``: checkpoints of a run, models in and out.

checkpoint list, show, verify, prune -> hlat.checkpoint
import  model of another program -> checkpoint      export  checkpoint -> Hugging Face folder
average checkpoints -> checkpoint                   fork    checkpoint of a run -> run
"""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hlat.cli.options import DryRunOption, JsonOption
from hlat.cli.terminal import CheckpointArgument, OverridesArgument, WeightsOption, opening_line, ready, say
from hlat.runtime.errors import CheckpointError, CheckpointFormatError, LaunchError
from hlat.runtime.storage.run_folder import RECIPE_NAME, is_kept
from hlat.runtime.terminal import TABLE_ROWS, escape_name, first_of, listed, plural
from hlat.runtime.urls import is_url, redact_json

if TYPE_CHECKING:
    from hlat.checkpoint import CheckpointEntry


app = typer.Typer(help="List, show, verify and remove the checkpoints of a run.", no_args_is_help=True)

RunArgument = Annotated[
    str, typer.Argument(help="Run folder, its checkpoints folder, or URL of its object store.", show_default=False)
]
CheckpointsArgument = Annotated[
    str, typer.Argument(help="Run folder, its checkpoints folder, one checkpoint, or a URL.", show_default=False)
]

_CHECKPOINTS = ("committed", "damaged", "newer format")  # states of folders that a run would try to resume from


@app.command("list")
def list_command(run: RunArgument, as_json: JsonOption = False) -> None:
    """List the checkpoints of a run, also damaged ones that were set aside and unfinished ones."""
    from hlat.checkpoint import RemotePrefix, find_checkpoints_folder, list_checkpoints

    ready()
    entries = RemotePrefix(run).entries() if is_url(run) else list_checkpoints(find_checkpoints_folder(Path(run)))
    if as_json:
        say(json.dumps([_plain(entry) for entry in entries], indent=2))
        return
    if not entries:
        say(f"{run}: no checkpoints")
    for entry in entries:
        say(_line(entry))


@app.command("show")
def show_command(checkpoint: CheckpointsArgument, as_json: JsonOption = False) -> None:
    """Show the contents of a checkpoint, or of a run's newest: position, versions, tensors by kind."""
    from hlat.checkpoint import RemotePrefix, group_tensors, open_unverified

    ready()
    if is_url(checkpoint):
        place, meta, groups = RemotePrefix(checkpoint).newest()
    else:
        found = open_unverified(Path(checkpoint))
        place, meta, groups = str(found.path), found.meta, group_tensors(found)
    if as_json:
        tensors = {group.name: asdict(group) for group in groups}
        # Checkpoints of earlier versions may hold credentials in URLs.
        say(json.dumps(redact_json({"path": place, **meta, "tensors": tensors}), indent=2))
        return
    say(place)
    say(", ".join(f"{name} {meta[name]:,}" for name in ("step", "samples", "tokens") if name in meta))
    say(", ".join(f"{name} {version}" for name, version in meta.get("versions", {}).items()))
    for group in groups:
        say(f"{group.name:24} {group.tensors:6,} tensors {group.elements:16,} elements  {', '.join(group.dtypes)}")


@app.command("verify")
def verify_command(checkpoint: CheckpointsArgument) -> None:
    """Compare every byte of a checkpoint, or of all checkpoints of a run, with its checksums. Nothing is changed."""
    ready(works=True)  # the exit code is the verdict
    checked = _verify_remote(checkpoint) if is_url(checkpoint) else _verify_folder(Path(checkpoint))
    if not checked:
        raise CheckpointError(f"{checkpoint}: no checkpoint there.")
    damaged = checked.count(False)
    if damaged:
        raise CheckpointError(
            f"{damaged} of {plural(len(checked), 'checkpoint')} damaged. A resumed run sets them aside and "
            "continues from the newest complete one."
        )


def _verify_folder(path: Path) -> list[bool]:
    from hlat.checkpoint import (
        find_checkpoints_folder,
        is_checkpoint,
        list_checkpoints,
        read_manifest,
        verify_checkpoint,
    )

    if is_checkpoint(path):
        folders = [path]
    else:
        listed = list_checkpoints(find_checkpoints_folder(path))
        folders = [Path(entry.location) for entry in listed if entry.state in _CHECKPOINTS]
    checked = []
    for folder in folders:
        begin = time.perf_counter()
        _refuse_newer_format(folder)
        problems = verify_checkpoint(folder)
        if problems and not folder.exists():
            # The run goes on and prunes its checkpoints: that is no damage.
            say(f"{folder} was removed meanwhile")
            checked.append(True)
            continue
        size = 0 if problems else sum(read_manifest(folder).file_bytes.values())
        checked.append(_report(str(folder), problems, size, begin))
    return checked


def _refuse_newer_format(folder: Path) -> None:
    from hlat.checkpoint import read_manifest

    try:
        read_manifest(folder)
    except CheckpointFormatError as error:
        raise CheckpointFormatError(f"{folder}: {error}") from error
    except CheckpointError:  # damage, which is reported below
        return


def _verify_remote(url: str) -> list[bool]:
    from hlat.checkpoint import RemotePrefix

    prefix = RemotePrefix(url)
    checked = []
    for entry in prefix.entries():
        if entry.state in _CHECKPOINTS:
            begin = time.perf_counter()
            checked.append(_report(entry.location, prefix.problems(entry.step), entry.bytes, begin))
    return checked


def _report(place: str, problems: list[str], size: int, begin: float) -> bool:
    if problems:
        say(f"{place} is damaged: {'; '.join(problems)}")
    else:
        say(f"{place} is whole: {size:,} bytes, {size / (time.perf_counter() - begin) / 1e9:.2f} GB/s")
    return not problems


@app.command("prune")
def prune_command(
    run: RunArgument,
    keep_last: Annotated[int, typer.Option(min=1, help="Number of newest checkpoints to keep.")],
    keep_every: Annotated[
        int | None, typer.Option(min=1, help="Also keep checkpoints at multiples of this many steps.")
    ] = None,
    dry_run: DryRunOption = False,
) -> None:
    """Remove old checkpoints of a run that is not being trained; the newest complete one and parents of forks stay."""
    from hlat.checkpoint import (
        CheckpointStore,
        find_checkpoints_folder,
        list_checkpoints,
        prunable_steps,
        verify_checkpoint,
    )
    from hlat.training import run_lock

    ready(works=not dry_run)
    if is_url(run):
        raise CheckpointError(f"{run}: a run prunes its object store itself, by checkpoint.keep_last. Give its folder.")
    folder = find_checkpoints_folder(Path(run))
    if dry_run:
        there = {entry.step: Path(entry.location) for entry in list_checkpoints(folder) if entry.state in _CHECKPOINTS}
        # The newest complete checkpoint stays, so damaged ones are not counted.
        steps = prunable_steps(list(there), keep_last, keep_every, lambda step: not verify_checkpoint(there[step]))
        say(f"would remove: {_listed([step for step in steps if not is_kept(there[step])])}")
        return
    try:
        # With the lock no run can write or prune meanwhile.
        with run_lock(Path(run).resolve() if (Path(run) / "checkpoints").is_dir() else folder.parent, say):
            removed = CheckpointStore(folder, keep_last, keep_every).prune()
    except LaunchError as error:
        raise LaunchError(
            f"{run}: is being trained and prunes its own checkpoints (checkpoint.keep_last). Wait until it has ended."
        ) from error
    say(f"removed: {_listed(removed)}")


def _listed(steps: list[int]) -> str:
    return listed((f"{step:,}" for step in steps), TABLE_ROWS) or "nothing"


def _line(entry: "CheckpointEntry") -> str:
    name = escape_name(entry.name)
    if entry.state != "committed":
        return f"{name:24} {entry.state}{': ' + entry.problem if entry.problem else ''}"
    saved = "" if entry.saved is None else f"{entry.saved:%Y-%m-%d %H:%M:%S} UTC"
    tokens = "" if entry.tokens is None else f"{entry.tokens:16,} tokens"
    kept = "  kept: a fork was made from it" if is_kept(Path(entry.location)) else ""
    return f"{name:24} {entry.bytes:18,} bytes {tokens}  {saved}{kept}"


def _plain(entry: "CheckpointEntry") -> dict[str, object]:
    saved = None if entry.saved is None else entry.saved.isoformat()
    rest = {name: value for name, value in asdict(entry).items() if name != "location"}
    return {"path": entry.location, **rest, "saved": saved}


Folder = Annotated[Path, typer.Option("--to", help="Folder to write; must not exist.")]


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command("import")(import_command)
    app.command("export")(export_command)
    app.command()(average)
    app.command()(fork)


def fork(
    run: Annotated[
        str, typer.Argument(metavar="RUN[@STEP]", help="Run folder and step; default: its newest.", show_default=False)
    ],
    to: Annotated[Path, typer.Option("--to", help="Folder of the new run; must not exist.")],
    overrides: OverridesArgument = None,
) -> None:
    """Make a new run from a checkpoint of a run, with another recipe from there on."""
    import hlat
    from hlat.config import short

    ready(works=True)
    with opening_line("forking"):
        made = hlat.fork(run, to, overrides or [])
    parent, size = f"{escape_name(str(made.parent))}@{made.step}", f"{made.shared_bytes / 1e6:,.1f} MB"
    say(f"forked {parent} to {escape_name(str(to))}: {size} of state by {made.way}")
    say(f"prepared data, shared: {escape_name(str(made.recipe.prepared_dir))}")
    shown, more = first_of(made.changes, TABLE_ROWS)
    for change in shown:
        say(f"  {change.path}: {short(change.old)} -> {short(change.new)}")
    if more:
        say(f"  {more}")
    before, now = made.rates
    of_step = f"learning rate of step {made.step + 1:,}: {now:.4g}"
    if before != now:
        say(f"{of_step}, as the new schedule has it there; was {before:.4g}")
    elif any(change.path.startswith(("optimizer.lr", "schedule.")) for change in made.changes):
        say(f"{of_step}, as before")
    say(f"next: hlat train {escape_name(str(to / RECIPE_NAME))}")


def import_command(
    source: Annotated[
        Path,
        typer.Argument(
            help="Folder of the model: Hugging Face's; shards of HLAT or NxDT; DCP files of torchtitan.",
            show_default=False,
        ),
    ],
    to: Folder,
    model: Annotated[
        str | None, typer.Option(help="Preset or config.json, if the folder has no config.json itself.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Its tokenizer, if it is not in the folder.")] = None,
) -> None:
    """Convert a model of another program to a checkpoint, for checkpoint.init_from, export and generate."""
    import hlat
    from hlat.checkpoint import has_tokenizer
    from hlat.config import PRESETS

    ready(works=True)
    with opening_line("converting"):
        path = hlat.import_model(source, to, model=model, tokenizer=tokenizer)
    say(f"imported to {path}")
    section = f"model.preset={model}" if model in PRESETS else f"model.hf_config={model or source}"
    stored = f" data.tokenizer.path={path / 'tokenizer'}" if has_tokenizer(path) else ""
    say(f"train from it with {section} checkpoint.init_from={path}{stored}")


def export_command(
    checkpoint: CheckpointArgument,
    to: Folder,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Dtype of the files; default: as stored.")
    ] = None,
    weights: WeightsOption = "model",
) -> None:
    """Write a checkpoint as a Hugging Face model that transformers loads."""
    import hlat

    ready(works=True)
    with opening_line("exporting"):
        path = hlat.export(checkpoint, to, dtype=dtype, weights=weights)
    say(f"exported to {path}")
    say(f"load it with transformers.AutoModelForCausalLM.from_pretrained({str(path)!r})")


def average(
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            help="Checkpoints (a run folder stands for its newest one), oldest first; or one run folder with --last.",
            show_default=False,
        ),
    ],
    to: Folder,
    last: Annotated[int | None, typer.Option(min=2, help="Average the newest N checkpoints of the run.")] = None,
    coefficients: Annotated[
        str | None, typer.Option(help="Factor of each checkpoint, as in 1,2,1; default: all equal.")
    ] = None,
    decay: Annotated[
        float | None, typer.Option(help="Exponential: each counts DECAY times as much as the next newer one.")
    ] = None,
    weights: WeightsOption = "model",
) -> None:
    """Average the weights of checkpoints of one model, saved in any layouts, into a new checkpoint."""
    import hlat.checkpoint

    ready(works=True)
    factors = None if coefficients is None else _numbers(coefficients)
    with opening_line("averaging"):
        path = hlat.average(checkpoints, to, last=last, coefficients=factors, decay=decay, weights=weights)
    parents = hlat.checkpoint.open_unverified(path).meta["average"]
    for parent in parents:
        say(f"{parent['share']:8.2%} of step {parent['step']:,}, {parent['path']}")
    say(f"averaged to {path}")


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise CheckpointError(f"--coefficients {text}: not numbers. Write them with commas, as in 1,2,1.") from None
