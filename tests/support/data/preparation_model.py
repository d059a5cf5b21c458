"""A simple reference model of preparation for small corpora, and random corpora with all kinds of rows."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st

from hlat.config.sections.data import DataConfig
from hlat.data.documents import SplitRule, hash_threshold, tail_start
from hlat.data.prepare.work_units import WorkUnit, write_tokenized_unit
from hlat.data.prepare.worker import WorkerPool
from hlat.data.prepared.prepared_folder import PreparedData
from hlat.data.tokenizers.base import Tokenizer
from hlat.data.tokenizers.load import load_saved

BAD = [b"{nonsense", b'{"text": "x\xff"}', b"[1]", b'{"content": "x"}', b'{"text": 7}', b'{"text": "x\\ud800"}']
TEXTS = ["one", "two words", "three short words", "a somewhat longer text, of which there is one copy or more", "ü日本"]

Row = str | bytes | None
"""A text, an unreadable line, or null."""


def corpora(longest: int = 12) -> st.SearchStrategy[list[list[list[Row]]]]:
    """Generate sources of files of rows; the first row is a text, so that there is something to train on."""
    rows = st.one_of(st.sampled_from(TEXTS), st.text(max_size=20), st.none(), st.just(""), st.sampled_from(BAD))
    files = st.lists(st.lists(rows, max_size=longest), min_size=1, max_size=3)
    return st.lists(files, min_size=1, max_size=2).map(
        lambda sources: [[["first", *sources[0][0]], *sources[0][1:]], *sources[1:]]
    )


def write(folder: Path, sources: list[list[list[Row]]]) -> list[dict[str, Any]]:
    """Write the files of a corpus; return its sources as a recipe lists them."""
    named = []
    for source, files in enumerate(sources):
        for number, rows in enumerate(files):
            file = folder / f"{source}" / f"{number}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            lines = [row if isinstance(row, bytes) else json.dumps({"text": row}).encode() for row in rows]
            file.write_bytes(b"".join(line + b"\n" for line in lines) or b"\n")
        named.append({"path": str(folder / f"{source}"), "name": f"source {source}"})
    return named


class Expected(NamedTuple):
    """Expected documents of each split as token lists, their bytes of text, and counts of duplicates and bad rows."""

    documents: dict[str, list[list[int]]]
    text_bytes: dict[str, int]
    copies: int
    copied_tokens: int
    bad: list[tuple[int, int, int]]


def expected(sources: list[list[list[Row]]], config: DataConfig, tokenizer: Tokenizer) -> Expected:
    """Compute the expected content of the prepared data of a corpus."""
    ends = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    documents: dict[str, list[list[int]]] = {"train": [], "validation": []}
    text_bytes = {"train": 0, "validation": 0}
    seen: set[str] = set()
    copies = copied_tokens = 0
    bad = []
    for source, files in enumerate(sources):
        texts = [row for rows in files for row in rows if isinstance(row, str) and row]
        bad += [
            (source, file, row) for file, rows in enumerate(files) for row, b in enumerate(rows) if isinstance(b, bytes)
        ]
        offset, assignment = 0, _assignment(config, sum(len(text) for text in texts))
        for text in texts:
            copy = text in seen
            seen.add(text)
            copies += copy
            for split, piece in assignment.split_document(text, text.encode(), offset):
                tokens = tokenizer.encode(piece) + ends
                copied_tokens += len(tokens) if copy else 0
                if not copy or config.duplicates == "keep":
                    documents[split].append(tokens)
                    text_bytes[split] += len(piece.encode())
            offset += len(text)
    return Expected(documents, text_bytes, copies, copied_tokens, bad)


def _assignment(config: DataConfig, characters: int) -> SplitRule:
    validation = config.validation
    if validation.fraction and validation.by == "tail":
        return SplitRule(boundary=tail_start(characters, validation.fraction))
    return SplitRule(below=hash_threshold(validation.fraction))


def check(prepared: PreparedData, sources: list[list[list[Row]]], wanted: Expected) -> None:
    """Check that prepared data holds the expected tokens, and that its counts add up to all rows."""
    for split, documents in wanted.documents.items():
        tokens, bounds = prepared.tokens(split), prepared.document_boundaries(split).tolist()
        assert tokens.read(0, len(tokens)).tolist() == [token for document in documents for token in document]
        assert [b - a for a, b in pairwise(bounds)] == [len(document) for document in documents]
        assert prepared.manifest.splits[split].text_bytes == wanted.text_bytes[split]
    manifest = prepared.manifest
    assert (manifest.total("copies"), sum(s.copied_tokens for s in manifest.rows)) == (
        wanted.copies,
        wanted.copied_tokens,
    )
    rows = [row for files in sources for rows in files for row in rows]
    assert manifest.total("rows") == len(rows)
    assert manifest.total("null_rows") == sum(row is None for row in rows)
    assert manifest.total("empty_documents") == sum(row == "" for row in rows)
    assert manifest.total("unreadable_rows") == len(wanted.bad)
    listed = []
    if manifest.quarantine is not None:
        for line in (prepared.dir / manifest.quarantine.file).read_text().splitlines():
            entry = json.loads(line)
            file = Path(entry["file"])
            assert entry["line"] == entry["row"] + 1 and entry["reason"]
            listed.append((int(file.parent.name), int(file.stem), entry["row"]))
    assert listed == wanted.bad


def tokenize_here(patch: pytest.MonkeyPatch) -> None:
    """Tokenize units in this process: starting workers takes longer than tokenizing a small corpus."""

    def run(pool: WorkerPool, units: Iterator[WorkUnit]) -> Iterator[int]:
        for unit in units:
            tokenizer, folder, dtype = pool._settings
            write_tokenized_unit(unit, load_saved(tokenizer), folder, dtype)
            yield unit.span.number

    patch.setattr(WorkerPool, "run", run)
