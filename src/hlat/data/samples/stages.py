"""Places where the stages of a run begin to read: functions of the stages before, so that no text is read twice.

    stages of a run --readings--> for each stream of a stage: its first sample, and the tokens that its rows are of

A stream is what has an order of its own: a source with a weight, or a corpus without weights. Stages in a row that
divide a stream into the same rows go on in its order. A stage with other rows, longer ones for one, gets the text
behind that of the stages before: a stream's documents are shared out between such groups of stages, each as many as
it reads, and the last group all that are left.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hlat.config import DataConfig, Recipe
from hlat.data.corpus_files import cache_location, files_of_source, numbered_sources
from hlat.data.prepared.manifest import read_data_manifest
from hlat.data.samples.order import build_mixture, is_weighted
from hlat.data.stores.cache import Cache
from hlat.runtime.errors import DataError, StorageError
from hlat.runtime.terminal import listed
from hlat.runtime.urls import is_url


@dataclass(frozen=True)
class Reading:
    """Part of a stream that a stage reads."""

    first: int = 0  # samples of the stream's order that earlier stages have read
    earlier: tuple[int, ...] = ()  # tokens of each group of stages before, that divided the stream into other rows
    own: int | None = None  # tokens of this stage's group, if such a group follows; None: all that are left


@dataclass(frozen=True)
class _Use:
    """Part of one stream that a stage reads."""

    count: int  # samples
    rows: Any  # what divides the stream into rows, and orders them
    limit: Any  # tokens of it that are used at all
    restarts: bool


@dataclass(frozen=True)
class _StageUse:
    """Streams that a stage reads, and how much of them."""

    name: str
    length: int
    streams: tuple[str, ...]
    uses: tuple[_Use, ...]  # of each stream

    def use(self, stream: str) -> _Use | None:
        return self.uses[self.streams.index(stream)] if stream in self.streams else None


def readings(recipe: Recipe) -> list[Reading]:
    """Return what the stage of a recipe reads of its streams, in the order of its sources.

    Raises:
        DataError: it is not known where the stage has to go on in a source.
    """
    place = recipe.place
    if place is None:
        return [Reading()] * (len(recipe.data.sources) if is_weighted(recipe.data) else 1)
    parts = [_part(stage) for stage in place.run.each_stage()]
    here = parts[place.index]
    return [_reading(parts, place.index, stream) for stream in here.streams]


def _part(recipe: Recipe) -> _StageUse:
    place, data = recipe.place, recipe.data
    assert place is not None, "the recipe of a stage"
    samples = place.batches.first_of(place.stop) - place.batches.first_of(place.first)
    texts = _text_names(data)
    again = _restarts(recipe)
    limits = [source.max_tokens for source in data.sources] or [None]
    mixture = build_mixture(data)
    rows: tuple[Any, ...] = (data.sequence_length, data.packing, data.shuffle)
    if mixture is None:
        rows = (*rows, *(source.repeat for source in data.sources if len(texts) > 1))
        joined = _Use(samples, rows, limits[0] if len(texts) == 1 else limits, all(again))
        return _StageUse(place.stage.name, data.sequence_length, ("\n".join(texts),), (joined,))
    # A weighted source has an order of its own, by its place in the list.
    orders = [(*rows, number) for number in range(len(texts))]
    uses = map(_Use, mixture.counts(samples).tolist(), orders, limits, again)
    return _StageUse(place.stage.name, data.sequence_length, tuple(texts), tuple(uses))


def _restarts(recipe: Recipe) -> list[bool]:
    """Return for each source of a stage whether its text is read anew."""
    assert recipe.place is not None, "the recipe of a stage"
    restart = recipe.place.stage.restart
    labels = [source.label for source in recipe.data.sources] or [""]
    return [restart if isinstance(restart, bool) else label in restart for label in labels]


def _text_names(data: DataConfig) -> list[str]:
    """Name the text of each source: its path, and the column if it is another one than that of all sources."""
    columns = [source.tokens_column or source.text_column for source in data.sources] or [None]
    paths = [source.path for source in data.sources] or [str(data.path)]
    named = zip(paths, columns, strict=True)
    default = data.tokens_column or data.text_column
    # One text has one name, however its path is written.
    return [
        (path if is_url(path) else os.path.normpath(path)) + ("" if column in (None, default) else f" ({column})")
        for path, column in named
    ]


def _reading(parts: Sequence[_StageUse], index: int, stream: str) -> Reading:
    earlier, samples = list[int](), 0
    before: tuple[_StageUse, _Use] | None = None
    for part in parts[: index + 1]:
        if (use := part.use(stream)) is None:
            continue
        if use.restarts or before is None:
            earlier, samples = [], 0
        elif use.limit != before[1].limit:
            raise DataError(
                f"stage {part.name} has another max_tokens of {stream} than stage {before[0].name}: which of its text "
                f"is left is not known. Keep max_tokens, or say restart: true in stage {part.name}."
            )
        elif use.rows != before[1].rows:
            earlier, samples = [*earlier, _needed(samples, before[0].length)], 0
        before = part, use
        samples += use.count if part is not parts[index] else 0
    _refuse_mixed(parts, index, stream)
    return Reading(samples, tuple(earlier), _own(parts, index, stream, samples))


def _own(parts: Sequence[_StageUse], index: int, stream: str, samples: int) -> int | None:
    """Return the tokens of a stage and those like it around it, if a stage with other rows follows them."""
    here = parts[index].use(stream)
    assert here is not None, "a stream of this stage"
    total = samples + here.count
    for part in parts[index + 1 :]:
        if (use := part.use(stream)) is None:
            continue
        if use.restarts:
            return None
        if use.rows != here.rows:
            return _needed(total, parts[index].length)
        total += use.count
    return None


def _needed(samples: int, length: int) -> int:
    # A row of either packing holds at most so many tokens, the label of its last one included.
    return samples * (length + 1)


def _refuse_mixed(parts: Sequence[_StageUse], index: int, stream: str) -> None:
    """Refuse a source that an earlier stage has read as part of another stream: which of its text is not known."""
    here = parts[index]
    if (use := here.use(stream)) is not None and use.restarts:
        return
    mine = set(stream.split("\n"))
    for part in reversed(parts[:index]):
        for other in part.streams:
            if other != stream and (both := mine & set(other.split("\n"))):
                raise DataError(
                    f"stage {here.name} reads {', '.join(sorted(both))}, of which stage {part.name} has read a part, "
                    "mixed with other text: which part is not known. Give the sources weights in both stages, or "
                    f"restart: true in stage {here.name} to read them anew."
                )
        if (use := part.use(stream)) is not None and use.restarts:
            return  # it began anew


def text_problem(recipe: Recipe, most_tokens: int | None) -> str:
    """Return why a stage cannot read its text once, as far as that is known before it is prepared; else nothing.

    ``most_tokens`` is an upper bound of the training tokens of the text; None if there is none.
    """
    try:
        reads = readings(recipe)
    except DataError as error:
        return str(error)
    used = sum(sum(each.earlier) + (each.own or 0) for each in reads)
    if most_tokens is None or not used or used < most_tokens:
        return ""
    return f"the text has at most {most_tokens:,} training tokens, {none_left(used)}"


def none_left(used: int) -> str:
    """Say that stages use up a text, and what would work."""
    return (
        f"and stages with other rows (sequence length, packing) before the last of them read {used:,}: none are left "
        "for it. Say restart: true in that stage to read the text anew, make the earlier stages shorter, or give more "
        "text."
    )


@dataclass(frozen=True)
class _Text:
    """Text of a source in a stage."""

    stage: int
    name: str
    files: frozenset[tuple[str, str]]  # of each its path without links, and the column
    restarts: bool


def same_texts(run: Recipe, *, stores: bool) -> Iterator[tuple[int, str]]:
    """Yield the number of a stage and what is wrong, if a file of it belongs to two texts, which are read each.

    With ``stores``, the files of URLs are listed too. Sources that cannot be listed are left out.
    """
    stages = run.each_stage() if run.stages else []
    texts, said = [_texts(number, stage, stores) for number, stage in enumerate(stages)], set[frozenset[str]]()
    for number, here in enumerate(texts):
        for place, text in enumerate(here):
            for other in [*here[:place], *_read_before(texts, text)]:
                names = frozenset((text.name, other.name))
                is_other = other.name != text.name or other.stage == number
                if is_other and names not in said and other.files & text.files:
                    said.add(names)  # stages that have the same texts have the same mistake
                    yield number, _read_twice(run, text, other)


def _texts(number: int, recipe: Recipe, stores: bool) -> list[_Text]:
    data = recipe.data
    sources = [source for source in numbered_sources(data) if source.number >= 0]
    files: list[set[tuple[str, str]]] = [set() for _ in sources]
    with suppress(DataError, StorageError, OSError):  # the preparation's to report
        if (manifest := read_data_manifest(recipe.prepared_dir)) is not None:
            for record in manifest.sources:
                if record.use == "split":
                    files[int(record.content[0])].add((_real(record.path), record.column))
        else:
            cache = Cache(*cache_location(data, recipe.prepared_dir))
            for source, found in zip(sources, files, strict=True):
                if stores or not is_url(source.path):
                    found |= {(_real(file.path), file.column) for file in files_of_source(source, cache)}
    columns = zip(_text_names(data), files, _restarts(recipe), strict=True)
    return [_Text(number, name, frozenset(found), restarts) for name, found, restarts in columns]


def _real(path: str) -> str:
    return path if is_url(path) else os.path.realpath(path)


def _read_before(texts: Sequence[Sequence[_Text]], text: _Text) -> Iterator[_Text]:
    """Yield the texts of earlier stages, back to the one in which this text began anew."""
    for number in range(text.stage - 1, -1, -1):
        if any(each.restarts for each in texts[number + 1] if each.name == text.name):
            return
        yield from texts[number]


def _read_twice(run: Recipe, text: _Text, other: _Text) -> str:
    here, there = (run.stages[each.stage].name for each in (text, other))
    files = listed(sorted(path for path, _ in text.files & other.files), 1)
    if text.stage == other.stage:
        return f"stage {here} has {files} twice, in {other.name} and in {text.name}. Leave one out."
    return (
        f"stage {here} reads {text.name}, and stage {there} {other.name}: both have {files}, and it would be read "
        f"twice. Write the path alike in both, or say restart: true in stage {here} to read the text anew."
    )
