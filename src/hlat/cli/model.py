"""``hlat import``, ``hlat export`` and ``hlat average``: models in and out, and averages of checkpoints."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from hlat.cli.common import CheckpointArgument, WeightsOption, ready, say
from hlat.runtime.errors import CheckpointError

Folder = Annotated[Path, typer.Option("--to", help="Folder to write; must not exist.")]


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command("import")(import_command)
    app.command("export")(export_command)
    app.command()(average)


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
