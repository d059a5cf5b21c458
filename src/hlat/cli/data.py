"""``hlat data``: from raw text to token shards."""

from typing import TYPE_CHECKING, Annotated

import typer

from hlat.cli.common import OverridesArgument, RecipeArgument, data_progress, ready, say
from hlat.config import load_recipe

if TYPE_CHECKING:
    from hlat.data import Prepared

app = typer.Typer(help="Prepare text for training.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps ``prepare`` a verb of its own while it is the only one."""


@app.command("prepare")
def prepare_command(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that tokenize; default one per core.")] = None,
) -> None:
    """Tokenize the recipe's text into memory-mapped shards. Interrupted, it goes on where it stopped.

    Data that was prepared before is verified byte for byte.
    """
    resolved = load_recipe(recipe, overrides or [])
    from hlat.data import check_tokenizer, check_vocabulary, prepare, verify

    ready()
    check_tokenizer(resolved.data, resolved.model.vocab_size)
    with data_progress() as progress:
        prepared = prepare(resolved.data, resolved.prepared_dir, workers=workers, progress=progress)
    verify(resolved.prepared_dir)
    check_vocabulary(prepared, resolved.model.vocab_size)
    say(_summary(prepared))
    say(f"prepared in {resolved.prepared_dir}")


def _summary(prepared: "Prepared") -> str:
    manifest = prepared.manifest
    lines = [f"vocabulary {manifest.vocab_size:,}, {manifest.dtype} tokens"]
    for name, split in manifest.splits.items():
        counts = f"{split.documents:,} documents, {split.tokens:,} tokens, {split.text_bytes:,} bytes of text"
        lines.append(f"{name:10s} {counts}")
    return "\n".join([*lines, *prepared.notes])
