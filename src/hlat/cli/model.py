"""``hlat import`` and ``hlat export``: from and to Hugging Face folders."""

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
        Path, typer.Argument(help="Hugging Face folder: config.json and safetensors.", show_default=False)
    ],
    to: Folder,
) -> None:
    """Convert a Hugging Face model to a checkpoint, for checkpoint.init_from, export and generate."""
    from hlat.checkpoint import has_tokenizer, import_hf

    ready()
    path = import_hf(source, to)
    say(f"imported to {path}")
    tokenizer = f" data.tokenizer.path={path / 'tokenizer'}" if has_tokenizer(path) else ""
    say(f"train from it with model.hf_config={source} checkpoint.init_from={path}{tokenizer}")


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
