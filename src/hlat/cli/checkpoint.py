"""``hlat checkpoint``: what checkpoints a run has, what is in them, whether they are whole, and which may go."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hlat.cli.common import CheckpointArgument, ready, say
from hlat.config import CheckpointError

if TYPE_CHECKING:
    from hlat.checkpoint import Entry

app = typer.Typer(help="List, show, verify and remove the checkpoints of a run.", no_args_is_help=True)

RunArgument = Annotated[str, typer.Argument(help="Run folder, or its checkpoints folder.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Everything as JSON.")]


@app.command("list")
def list_command(run: RunArgument, as_json: JsonOption = False) -> None:
    """List the checkpoints of a run, those that were set aside as damaged, and what was left unfinished."""
    from hlat.checkpoint import checkpoints_folder, inventory

    ready()
    entries = inventory(checkpoints_folder(Path(run)))
    if as_json:
        say(json.dumps([_plain(entry) for entry in entries], indent=2))
        return
    if not entries:
        say(f"{run}: no checkpoints")
    for entry in entries:
        say(_line(entry))


@app.command("show")
def show_command(checkpoint: CheckpointArgument, as_json: JsonOption = False) -> None:
    """Tell what a checkpoint holds: position in the run, versions, tensors by kind. Of a run, its newest whole one."""
    from hlat.checkpoint import contents, open_checkpoint, resolve

    ready()
    found = open_checkpoint(resolve(Path(checkpoint)))
    groups = contents(found)
    if as_json:
        tensors = {group.name: asdict(group) for group in groups}
        say(json.dumps({"path": str(found.path), **found.meta, "tensors": tensors}, indent=2))
        return
    say(str(found.path))
    position = (f"{name} {found.meta[name]:,}" for name in ("step", "samples", "tokens") if name in found.meta)
    say(", ".join(position) or f"step {found.step:,}")
    say(", ".join(f"{name} {version}" for name, version in found.meta.get("versions", {}).items()))
    for group in groups:
        say(f"{group.name:24} {group.tensors:6,} tensors {group.elements:16,} elements  {', '.join(group.dtypes)}")


@app.command("verify")
def verify_command(checkpoint: CheckpointArgument) -> None:
    """Compare every byte of a checkpoint, or of all of a run's, with its checksums. Nothing is changed."""
    from hlat.checkpoint import MARKER_NAME, checkpoints_folder, inventory, verify

    ready()
    path = Path(checkpoint)
    alone = (path / MARKER_NAME).exists() or path.name.startswith("step-")
    folders = [path] if alone else [e.path for e in inventory(checkpoints_folder(path)) if e.state in _CHECKED]
    if not folders:
        raise CheckpointError(f"{path}: no checkpoint there.")
    damaged = []
    for folder in folders:
        begin = time.perf_counter()
        problems = verify(folder)
        if problems:
            damaged.append(f"{folder}: {'; '.join(problems)}")
            continue
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        say(f"{folder} is whole: {size:,} bytes, {size / (time.perf_counter() - begin) / 1e9:.2f} GB/s")
    if damaged:
        count = f"{len(damaged)} of {len(folders)} checkpoints are damaged"
        raise CheckpointError("\n  ".join([f"{count}; a run passes over them and sets them aside:", *damaged]))


@app.command("prune")
def prune_command(
    run: RunArgument,
    keep_last: Annotated[int, typer.Option(min=1, help="How many of the newest are kept.")],
    keep_every: Annotated[int | None, typer.Option(min=1, help="Multiples of so many steps are kept too.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would be removed.")] = False,
) -> None:
    """Remove old checkpoints of a run that is not being trained; the newest whole one always stays."""
    from hlat.checkpoint import CheckpointStore, checkpoints_folder
    from hlat.training import run_lock

    ready()
    folder = checkpoints_folder(Path(run)).absolute()
    with run_lock(folder.parent):
        store = CheckpointStore(folder, keep_last, keep_every)
        steps = store.surplus() if dry_run else store.prune()
    listed = ", ".join(f"{step:,}" for step in steps) or "nothing"
    say(f"{'would remove' if dry_run else 'removed'}: {listed}")


_CHECKED = ("committed", "damaged")


def _line(entry: "Entry") -> str:
    name = entry.path.name
    if entry.state != "committed":
        return f"{name:24} {entry.state}{': ' + entry.problem if entry.problem else ''}"
    saved = "" if entry.saved is None else f"{entry.saved:%Y-%m-%d %H:%M:%S} UTC"
    tokens = "" if entry.tokens is None else f"{entry.tokens:16,} tokens"
    return f"{name:24} {entry.bytes:18,} bytes {tokens}  {saved}"


def _plain(entry: "Entry") -> dict[str, object]:
    saved = None if entry.saved is None else entry.saved.isoformat()
    return {**asdict(entry), "path": str(entry.path), "saved": saved}
