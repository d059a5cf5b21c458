"""``hlat import`` and ``hlat export``: models of other programs in, Hugging Face folders out."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from hlat.cli.common import CheckpointArgument, WeightsOption, ready, say

Folder = Annotated[Path, typer.Option("--to", help="Folder to write; must not exist.")]


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command("import")(import_command)
    app.command("export")(export_command)


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
    from hlat.checkpoint import has_tokenizer, import_model
    from hlat.config import PRESETS

    ready()
    path = import_model(source, to, model=model, tokenizer=tokenizer)
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
    from hlat.checkpoint import export_hf

    ready()
    path = export_hf(checkpoint, to, dtype=dtype, weights=weights)
    say(f"exported to {path}")
    say(f"load it with transformers.AutoModelForCausalLM.from_pretrained({str(path)!r})")
