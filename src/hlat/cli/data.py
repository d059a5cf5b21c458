"""``hlat data``: from raw text to token shards, on one machine or on several, and what is in them.

prepare, merge, tokenizer -> hlat.data.prepare -> a summary
show, verify -> folder of prepared data -> contents, or a complete check
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import hlat
from hlat.cli.options import JsonOption, StageOption
from hlat.cli.terminal import AllOption, OverridesArgument, RecipeArgument, data_progress, ready, say
from hlat.runtime.errors import DataError
from hlat.runtime.terminal import TABLE_ROWS, be_verbose, escape_controls, escape_name, first_of, plural

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from hlat.config import DataConfig, Recipe
    from hlat.data import LengthStatistics, PreparedData, Summary, TextSample


DataArgument = Annotated[
    str,
    typer.Argument(metavar="RECIPE|FOLDER", help="Recipe, folder of prepared data, or run folder.", show_default=False),
]

_BAR = 30  # width of the longest bar in characters

data_app = typer.Typer(help="Prepare text for training, and inspect it.", no_args_is_help=True)


@data_app.command("show")
def show_command(
    source: DataArgument,
    overrides: OverridesArgument = None,
    stage: StageOption = None,
    samples: Annotated[int, typer.Option(min=0, help="Samples of text to show of each split.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each sample.")] = 128,
    as_json: JsonOption = False,
    verbose: AllOption = False,
) -> None:
    """Show the contents of prepared data: counts, document lengths, copies, unreadable rows, samples of the text."""
    if verbose:
        be_verbose()
    folder, _ = _find(source, overrides, stage)[0]
    from hlat.data import open_prepared, summarize

    ready()
    summary = summarize(open_prepared(folder), samples, max_tokens)
    if as_json:
        say(json.dumps(_plain(summary), indent=2))
        return
    from rich.console import Console

    console = Console()
    with console.capture() as captured:
        for part in _rendered(summary):
            console.print(part)
    say(captured.get().rstrip("\n"))


@data_app.command("verify")
def verify_command(source: DataArgument, overrides: OverridesArgument = None, stage: StageOption = None) -> None:
    """Check prepared data completely: checksums, counts, token range, boundaries. Nothing is changed.

    Every problem is listed. With a recipe, its settings have to be those that the data was prepared with.
    """
    found = _find(source, overrides, stage)
    from hlat.data import verify_data

    ready(works=True)  # the exit code is the verdict
    for folder, config in found:
        with data_progress() as progress:
            prepared = verify_data(folder, config, progress)
        files = sum(len(split.shards) for split in prepared.manifest.splits.values())
        tokens = prepared.train_tokens + prepared.validation_tokens
        say(f"{folder} is whole: {plural(files, 'shard')}, {tokens:,} tokens")


def _find(source: str, overrides: list[str] | None, stage: str | None) -> "list[tuple[Path, DataConfig | None]]":
    """Return folders of prepared data, those of all stages or of one, with the data section if a recipe was named."""
    folder = Path(source)
    if folder.is_dir() and not overrides:
        below = folder / "data"
        # A run folder holds its prepared data there.
        return [(below if (below / "manifest.json").exists() else folder, None)]
    from hlat.config import RECIPE_ENDINGS, RecipeError

    try:
        recipe = hlat.load_recipe(source, overrides or [])
    except RecipeError as error:
        of_its_content = any(each.path == str(folder) for each in error.problems)  # not of its fields or includes
        is_refused = isinstance(error.__cause__, OSError)  # so nobody knows what it is
        if not folder.is_file() or folder.suffix in RECIPE_ENDINGS or is_refused or not of_its_content:
            raise
        name = escape_name(source)
        raise DataError(
            f"{name} is a file, but no recipe. Give a recipe, a folder of prepared data or a run folder: what is shown "
            f"or verified is data that was prepared. For a text, `hlat init {name}` writes a recipe, and `hlat data "
            "prepare RECIPE` prepares it."
        ) from error
    return [(each.prepared_dir, each.data) for each in _corpora(recipe, stage)]


def _corpora(recipe: "Recipe", stage: str | None) -> "list[Recipe]":
    return recipe.each_corpus() if stage is None else [recipe.stage(stage)]


def _plain(summary: "Summary") -> object:
    from pydantic import TypeAdapter

    return TypeAdapter(type(summary)).dump_python(summary, mode="json")


def _rendered(summary: "Summary") -> "Iterator[RenderableType]":
    from rich.rule import Rule
    from rich.text import Text

    yield Text(f"{summary.folder}\nvocabulary {summary.vocab_size:,}, {summary.dtype} tokens, {summary.fingerprint}")
    yield _splits(summary)
    yield _rows(summary)
    for note in summary.notes:
        yield Text(note)
    for name, split in summary.splits.items():
        if split.lengths is not None:
            yield Rule(Text(f"{name}: tokens per document"), align="left", style="dim")
            yield _histogram(split.lengths)
    for sample in summary.samples:
        yield Rule(Text(f"{sample.split}: from token {sample.position:,}"), align="left", style="dim")
        yield _passages(sample)


def _splits(summary: "Summary") -> "Table":
    table = _table("split", "source", "documents", "tokens", "bytes", "bytes/token", "shards")
    for name, split in summary.splits.items():
        ratio = f"{split.text_bytes / split.tokens:.2f}" if split.tokens else "-"
        counts = (f"{split.documents:,}", f"{split.tokens:,}", f"{split.text_bytes:,}", ratio, f"{split.shards:,}")
        table.add_row(name, "all", *counts)
        shown, more = first_of(split.sources if len(summary.rows) > 1 else [], TABLE_ROWS)
        for source in shown:
            table.add_row("", _cell(source.name), f"{source.documents:,}", f"{source.tokens:,}")
        if more:
            table.add_row("", more)
    return table


def _rows(summary: "Summary") -> "Table":
    table = _table("source", "rows", "null", "empty", "unreadable", "documents", "copies", "their tokens")
    shown, more = first_of(summary.rows, TABLE_ROWS)
    for source in shown:
        counts = (
            source.rows, source.null_rows, source.empty_documents, source.unreadable_rows, source.documents,
            source.copies, source.copied_tokens,
        )  # fmt: skip
        table.add_row(_cell(source.name or ""), *(f"{count:,}" for count in counts))
    if more:
        table.add_row(more)
    return table


def _histogram(lengths: "LengthStatistics") -> "Table":
    table = _table("tokens", "documents", "of all tokens", "")
    most = max(bucket.documents for bucket in lengths.buckets)
    total = max(sum(bucket.tokens for bucket in lengths.buckets), 1)
    for bucket in lengths.buckets:
        # A single document must be seen beside a bar of millions.
        bar = "█" * round(_BAR * bucket.documents / most) or ("▏" if bucket.documents else "")
        share = f"{bucket.tokens / total:.1%}"
        table.add_row(f"{bucket.at_least:,} to {bucket.at_most:,}", f"{bucket.documents:,}", share, bar)
    table.columns[-1].justify = "left"
    table.caption = (
        f"shortest {lengths.shortest:,}, median {lengths.median:,}, mean {lengths.mean:,.1f}, 90 % {lengths.p90:,}, "
        f"99 % {lengths.p99:,}, longest {lengths.longest:,}"
    )
    table.caption_justify = "left"
    return table


def _passages(sample: "TextSample") -> "Text":
    from rich.text import Text

    shown = Text()
    for passage in sample.passages:
        if passage.begins:
            shown.append(f"[document {passage.document:,}, {passage.document_tokens:,} tokens, begins]\n", "bold cyan")
        else:
            shown.append(f"[in document {passage.document:,}]\n", "dim")
        shown.append(escape_controls(passage.text))
        if passage.ends:
            shown.append(f"\n[document {passage.document:,} ends]", "bold cyan")
        shown.append("\n")
    return shown


def _table(*names: str) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(names):
        table.add_column(Text(name), justify="left" if number == 0 or name == "source" else "right")
    return table


def _cell(text: str) -> "Text":
    from rich.text import Text

    return Text(escape_name(text))  # as plain text: rich markup in it has no effect


WorkersOption = Annotated[
    int | None, typer.Option(min=1, help="Worker processes that tokenize; default: one per core.")
]


@data_app.command("prepare")
def prepare_command(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    workers: WorkersOption = None,
    stage: StageOption = None,
    part: Annotated[
        str | None,
        typer.Option(
            metavar="I/N", help="Prepare part I of N only, into a folder of its own next to the complete one."
        ),
    ] = None,
) -> None:
    """Tokenize the recipe's text into memory-mapped shards. If interrupted, it continues where it stopped.

    With data.mode=online only what training needs besides: tokenizer, validation text, a catalogue of blocks.
    Data that was prepared before is verified byte for byte. On several machines, each prepares a part of the files
    with --part 1/3, --part 2/3 and so on, and hlat data merge puts them together. Of a recipe with stages, the data
    of all is prepared, each folder once; that of a later stage may be prepared while an earlier one trains.
    """
    for resolved in _corpora(hlat.load_recipe(recipe, overrides or []), stage):
        if part is None:
            _prepare(resolved, workers)
        else:
            _prepare_part(resolved, part, workers)


def _prepare(recipe: "Recipe", workers: int | None) -> None:
    from hlat.data import check_tokenizer, check_vocabulary, prepare_recipe_data, verify_data

    ready(works=True)
    # Before text is read, which may take long.
    check_tokenizer(recipe.data, recipe.model.vocab_size)
    with data_progress() as progress:
        prepared = prepare_recipe_data(recipe, workers=workers, progress=progress)
        verify_data(recipe.prepared_dir, progress=progress)
    check_vocabulary(prepared, recipe.model.vocab_size)
    say(_summary(prepared))
    say(f"prepared in {recipe.prepared_dir}")


def _prepare_part(recipe: "Recipe", part: str, workers: int | None) -> None:
    from hlat.data import check_first_stage, check_tokenizer, partition_folder, prepare_partition

    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part)
    if match is None or int(match[1]) > int(match[2]):
        raise DataError(f"--part {part}: not a part. Write --part 2/3 for the second part of three.")
    if recipe.data.mode == "online":
        raise DataError(f"--part {part}: with data.mode=online nothing is tokenized before training.")
    number, parts = int(match[1]), int(match[2])
    folder = partition_folder(recipe.prepared_dir, number, parts)
    ready(works=True)
    check_first_stage(recipe)
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


@data_app.command("merge")
def merge_command(
    recipe: RecipeArgument,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FOLDERS]... [OVERRIDES]...",
            help="Folders of all parts; default: those next to the recipe's data folder. Overrides as elsewhere.",
        ),
    ] = None,
    stage: StageOption = None,
) -> None:
    """Merge all parts: byte for byte the data that one machine would have prepared.

    The parts are only read, and may be deleted afterwards. If interrupted, it continues where it stopped.
    """
    # Folders and overrides share one argument; only overrides begin with a dotted name and an equals sign.
    overrides = [word for word in words or [] if re.match(r"[a-z_]\w*(\.\w+)*=", word)]
    folders = [Path(word) for word in words or [] if word not in overrides]
    resolved = _corpora(hlat.load_recipe(recipe, overrides), stage)[0]
    from hlat.data import (
        check_tokenizer,
        check_vocabulary,
        find_partition_folders,
        merge_partition_folders,
        verify_data,
    )

    ready(works=True)
    check_tokenizer(resolved.data, resolved.model.vocab_size)
    with data_progress() as progress:
        parts = folders or find_partition_folders(resolved.prepared_dir)
        prepared = merge_partition_folders(resolved.data, resolved.prepared_dir, parts, progress)
        verify_data(resolved.prepared_dir, progress=progress)
    check_vocabulary(prepared, resolved.model.vocab_size)
    say(_summary(prepared))
    say(f"merged {len(parts)} parts in {resolved.prepared_dir}")


@data_app.command("tokenizer")
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
    odd = [source for source in manifest.rows if source.copies or source.unreadable_rows]
    shown, more = first_of(odd if len(manifest.rows) > 1 else [])
    for source in shown:
        copies = f"{plural(source.copies, 'copy')} ({source.copied_tokens:,} tokens)"
        lines.append(f"  {manifest.source_names[source.source]}: {copies}, {source.unreadable_rows:,} unreadable rows")
    lines += [f"  {more} sources with such rows"] if more else []
    return "\n".join(lines)
