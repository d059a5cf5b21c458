"""Facts that a recipe is drafted from: the corpus and the machine at hand.

    paths -> sources -> files -> a sample of documents -> Texts: column, size, bytes that a token stands for
    torch -> device type, number, peak, memory -> Machine: FLOP/s that training is assumed to reach

Of the corpus nothing is read but the sample, a few megabytes spread over the files.
"""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from hlat.config import DataConfig
from hlat.data import WHOLE_FILE, InputFile, Row, SourceFile, Tokenizer, list_files, train_bpe
from hlat.draft.sources import source_names, source_paths
from hlat.hardware import peak_flops
from hlat.runtime.backend.device import choose_device, has_fast_bf16
from hlat.runtime.backend.table import backend_of
from hlat.runtime.errors import DataError
from hlat.runtime.process import RankInfo

_COLUMNS = ("text", "content", "body", "document", "article", "raw_content", "code")
_FILES = 16  # that are sampled
_BYTES = 1 << 20  # of text that are sampled
_PART_BYTES = 1 << 15  # of a part of a file, of which several are read

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Texts:
    """A corpus, seen from a sample; or one of its sources."""

    path: str  # as data.path takes it; empty for several sources
    files: int  # number
    kinds: tuple[str, ...]  # words for its kinds of files, sorted
    column: str | None  # of the text; None for formats without columns
    text_bytes: int  # UTF-8 of all text, estimated
    sample: tuple[str, ...]  # documents
    name: str = ""  # of a source
    sources: tuple["Texts", ...] = ()  # several; empty for a path alone
    left_out: tuple[str, ...] = ()  # files of a mixed folder that are in no source

    def tokens(self, vocab_size: int, tokenizer: Tokenizer | None) -> int:
        """Estimate the tokens of the corpus by a tokenizer; None trains one of ``vocab_size`` on the sample."""
        # A tokenizer trained on the sample fits it a little too well, so the estimate is a little low.
        tokenizer = tokenizer or train_bpe(self.sample, vocab_size)
        if self.sources:
            return sum(source.tokens(vocab_size, tokenizer) for source in self.sources)
        sampled = sum(len(text.encode()) for text in self.sample)
        return round(self.text_bytes / sampled * sum(len(tokenizer.encode(text)) for text in self.sample))


def look_at_corpus(paths: Sequence[str], column: str | None = None) -> Texts:
    """Look at a corpus: files, folders or globs, each of one format or several; see ``look_at_texts``."""
    found, left_out = source_paths(paths)
    if len(found) == 1:
        return replace(look_at_texts(found[0].path, column), left_out=tuple(left_out))
    sources = tuple(
        replace(look_at_texts(source.path, column, len(found)), name=name)
        for source, name in zip(found, source_names(found), strict=True)
    )
    files, size = sum(source.files for source in sources), sum(source.text_bytes for source in sources)
    kinds = tuple(sorted({kind for source in sources for kind in source.kinds}))
    sample = tuple(text for source in sources for text in source.sample)
    return Texts("", files, kinds, None, size, sample, sources=sources, left_out=tuple(left_out))


def look_at_texts(path: str, column: str | None = None, among: int = 1) -> Texts:
    """Look at a file, folder or glob, which is one of so many.

    ``column`` is that of the text, or its key; None tries the usual names.

    Raises:
        DataError: there are no files, files of a type that hlat does not read, no such column, or no text.
    """
    with tempfile.TemporaryDirectory() as folder:  # for the cache of remote files
        files = list_files(DataConfig(path=path, text_column=column or _COLUMNS[0]), Path(folder))
        chosen = _evenly(files, max(1, _FILES // among))
        has_columns = not all(file.format.is_one_document for file in files)
        found = (column or _find_column(chosen[0])) if has_columns else None
        samples = [_sample(file, found or "", _BYTES // among // len(chosen)) for file in chosen]
    documents = [text for sample in samples for text in sample.documents]
    if not any(documents):
        raise DataError(f"{path}: the first documents of its files are empty, so there is nothing to train on.")
    size = sum(file.size for file in files)
    text = round(size * sum(sample.text_bytes for sample in samples) / sum(file.size for file in chosen))
    kinds = tuple(sorted({file.format.kind for file in files}))
    return Texts(path, len(files), kinds, found, text, tuple(documents))


def _find_column(file: SourceFile) -> str:
    """Return the first of the usual columns that a file has."""
    first: DataError | None = None
    for column in _COLUMNS:
        try:
            _sample(file, column, 1)
        except DataError as error:
            first = first or error
        else:
            return column
    assert first is not None, "there are columns to be tried"
    raise DataError(f"{first} Name the column of the text with --text-column.") from first


class _Sample(NamedTuple):
    """Documents of a file, and the estimated bytes of all its text."""

    documents: list[str]
    text_bytes: int


def _sample(file: SourceFile, column: str, limit: int) -> _Sample:
    """Read about ``limit`` bytes of a file, from parts all over it, else from its beginning; may raise DataError."""
    with file.open_local() as local:
        content = InputFile(local, column)
        parts = list(file.format.ranges(content, _PART_BYTES)) if not file.format.is_one_document else [WHOLE_FILE]
        if parts in ([], [WHOLE_FILE]):
            return _beginning(file, content, limit)
        chosen = _evenly(parts, max(1, limit // _PART_BYTES))
        reader = file.format.range_reader()
        documents = [text for part in chosen for text in _texts(file, reader(content, part, 0))]
    text_bytes = sum(len(text.encode()) for text in documents) * len(parts) / len(chosen)
    return _Sample(documents, round(text_bytes))


def _beginning(file: SourceFile, content: InputFile, limit: int) -> _Sample:
    """Read documents from the beginning of a file, the last one cut."""
    documents: list[str] = []
    size, read, rows = 0, 1, 0
    for row in file.format.documents(content):
        text = "".join(_texts(file, [row]))
        whole, rows, read = len(text.encode()), rows + 1, max(row.position, 1)
        kept = text[: max(1, len(text) * max(limit - size, 0) // whole)] if size + whole > limit else text
        documents.append(kept)
        size += whole
        if size > limit:
            return _Sample(documents, size if file.format.is_one_document else round(size * file.size / read))
    return _Sample(documents, size)


def _texts(file: SourceFile, rows: Iterable[Row]) -> Iterator[str]:
    for number, row in enumerate(rows):
        # A bad row at the beginning means that this is no text to train on.
        if row.error is not None and number == 0:
            raise DataError(f"{file.path}: {row.error.reason}. {row.error.remedy}")
        if isinstance(row.content, str):
            yield row.content


def _evenly(items: Sequence[_Item], count: int) -> list[_Item]:
    count = min(count, len(items))
    return [items[number * len(items) // count] for number in range(count)]


# Published runs of dense models on accelerators reach 0.3 to 0.55 of the published peak (benchmarks/published). hlat's
# own step on CPUs reached 0.3 to 0.7 of measured products (docs/notebook/speed.md), and of small models less: 0.36 with
# 2.4 million parameters, 0.26 with 1.0 (docs/notebook/quickstart.md), 0.09 to 0.12 with 0.37.
_REACHED = 0.35
_SHORT_PRODUCTS = 2.4e6  # parameters


def reached(parameters: float, *, is_host: bool) -> float:
    """Return the share of the peak that a step of a model is assumed to reach."""
    return _REACHED * min(1.0, sqrt(parameters / _SHORT_PRODUCTS)) if is_host else _REACHED


@dataclass(frozen=True)
class Machine:
    """Devices of this machine, and what they can do."""

    name: str  # of a device, for people
    devices: int  # processes that a run starts here: 1 on a CPU
    peak: float  # FLOP/s of one device in the dtype of precision.mode auto
    memory_bytes: int  # of one device
    is_host: bool  # the CPU, whose memory holds everything else too

    def rate(self, parameters: float) -> float:
        """FLOP/s that training a model is assumed to reach on all devices together."""
        return reached(parameters, is_host=self.is_host) * self.peak * self.devices


def look_at_machine(device: str = "auto") -> Machine:
    """Look at this machine; a CPU is measured for under a second. LaunchError: there is no such device."""
    chosen = choose_device(device, RankInfo())
    backend = backend_of(chosen)
    peak = peak_flops(chosen, torch.bfloat16 if has_fast_bf16(chosen) else torch.float32)
    devices = 1 if backend.is_shared else backend.device_count()
    memory = backend.memory_bytes(chosen)
    return Machine(backend.describe(chosen), devices, peak.value, memory, backend.is_shared)
