"""``hlat data``: from raw text to token shards, on one machine or on several."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import hlat
from hlat.cli.common import OverridesArgument, RecipeArgument, data_progress, ready, say
from hlat.cli.data import show
from hlat.runtime.errors import DataError
from hlat.runtime.terminal_text import plural

if TYPE_CHECKING:
    from hlat.config import Recipe
    from hlat.data import PreparedData

app = typer.Typer(help="Prepare text for training, and inspect it.", no_args_is_help=True)
show.register(app)

WorkersOption = Annotated[
    int | None, typer.Option(min=1, help="Worker processes that tokenize; default: one per core.")
]


@app.command("prepare")
def prepare_command(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    workers: WorkersOption = None,
    part: Annotated[
        str | None,
        typer.Option(
            metavar="I/N", help="Prepare part I of N only, into a folder of its own next to the complete one."
        ),
    ] = None,
) -> None:
    """Tokenize the recipe's text into memory-mapped shards. If interrupted, it continues where it stopped.

    With data.mode=online only what training needs besides: tokenizer, validation text, a catalogue of blocks.
    Data that was prepared before is verified byte for byte, and its manifest gets a checksum if it has none. On several
    machines, each prepares a part of the files with --part 1/3, --part 2/3 and so on, and hlat data merge puts them
    together.
    """
    resolved = hlat.load_recipe(recipe, overrides or [])
    if part is not None:
        _prepare_part(resolved, part, workers)
        return
    from hlat.data import check_tokenizer, check_vocabulary, prepare_recipe_data, verify_and_seal

    ready(works=True)
    check_tokenizer(resolved.data, resolved.model.vocab_size)
    with data_progress() as progress:
        prepared = prepare_recipe_data(resolved, workers=workers, progress=progress)
        vouched = verify_and_seal(resolved.prepared_dir, progress=progress)
    check_vocabulary(prepared, resolved.model.vocab_size)
    say("\n".join([_summary(prepared), *vouched.advice]))
    say(f"prepared in {resolved.prepared_dir}")


def _prepare_part(recipe: "Recipe", part: str, workers: int | None) -> None:
    from hlat.data import check_tokenizer, partition_folder, prepare_partition

    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part)
    if match is None or int(match[1]) > int(match[2]):
        raise DataError(f"--part {part}: not a part. Write --part 2/3 for the second part of three.")
    if recipe.data.mode == "online":
        raise DataError(f"--part {part}: with data.mode=online nothing is tokenized before training.")
    number, parts = int(match[1]), int(match[2])
    folder = partition_folder(recipe.prepared_dir, number, parts)
    ready(works=True)
    check_tokenizer(recipe.data, recipe.model.vocab_size)
    with data_progress() as progress:
        record = prepare_partition(recipe.data, folder, number, parts, workers=workers, progress=progress)
    files = record.stop - record.first
    say(
        f"part {number} of {parts}: {files:,} of {plural(len(record.files), 'file')}, in {plural(record.units, 'unit')}"
    )
    if files == 0:
        say("No file falls to it: parts are made of whole files. It is merged all the same.")
    say(f"prepared in {folder}")
    say("when all parts are, hlat data merge with the same recipe puts them together")


@app.command("merge")
def merge_command(
    recipe: RecipeArgument,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FOLDERS]... [OVERRIDES]...",
            help="Folders of all parts; default: those next to the recipe's data folder. Overrides as elsewhere.",
        ),
    ] = None,
) -> None:
    """Merge all parts: byte for byte the data that one machine would have prepared.

    The parts are only read, and may be deleted afterwards. If interrupted, it continues where it stopped.
    """
    overrides = [word for word in words or [] if re.match(r"[a-z_]\w*(\.\w+)*=", word)]
    folders = [Path(word) for word in words or [] if word not in overrides]
    resolved = hlat.load_recipe(recipe, overrides)
    from hlat.data import (
        check_tokenizer,
        check_vocabulary,
        find_partition_folders,
        merge_partition_folders,
        verify_and_seal,
    )

    ready(works=True)
    check_tokenizer(resolved.data, resolved.model.vocab_size)
    with data_progress() as progress:
        parts = folders or find_partition_folders(resolved.prepared_dir)
        prepared = merge_partition_folders(resolved.data, resolved.prepared_dir, parts, progress)
        vouched = verify_and_seal(resolved.prepared_dir, progress=progress)
    check_vocabulary(prepared, resolved.model.vocab_size)
    say("\n".join([_summary(prepared), *vouched.advice]))
    say(f"merged {len(parts)} parts in {resolved.prepared_dir}")


@app.command("tokenizer")
def tokenizer_command(
    recipe: RecipeArgument,
    to: Annotated[Path, typer.Option("--to", help="Folder to write; must not exist.")],
    overrides: OverridesArgument = None,
) -> None:
    """Train the recipe's tokenizer and nothing else, for machines that prepare parts."""
    resolved = hlat.load_recipe(recipe, overrides or [])
    from hlat.data import train_tokenizer

    ready(works=True)
    with data_progress() as progress:
        tokenizer = train_tokenizer(resolved.data, to, progress)
    say(f"vocabulary {tokenizer.vocab_size:,}")
    say(f"trained in {to}: prepare with data.tokenizer.path={to}")


def _summary(prepared: "PreparedData") -> str:
    manifest = prepared.manifest
    lines = [f"vocabulary {manifest.vocab_size:,}, {manifest.dtype} tokens"]
    for name, split in manifest.splits.items():
        counts = f"{plural(split.documents, 'document')}, {split.tokens:,} tokens, {split.text_bytes:,} bytes of text"
        if manifest.blocks is None or name == "validation":
            lines.append(f"{name:10s} {counts}")
    if manifest.blocks is not None:
        lines.append(
            f"{plural(sum(manifest.blocks.counts), 'block')} of {plural(len(manifest.sources), 'file')}, for training"
        )
    lines += prepared.notes
    for source in manifest.rows if len(manifest.rows) > 1 else []:
        if source.copies or source.unreadable_rows:
            copies = f"{plural(source.copies, 'copy')} ({source.copied_tokens:,} tokens)"
            lines.append(
                f"  {manifest.source_names[source.source]}: {copies}, {source.unreadable_rows:,} unreadable rows"
            )
    return "\n".join(lines)
