"""Split a small corpus into training and validation text as the preparation does, without tokenizing it.

files of each source --read, hashed--> SourceSplit: documents and bytes of both splits --> problem, or a warning

Documents are chosen for validation by hash, so what a fraction keeps aside of few documents is found by reading them
only. Corpora of more than 16 MB are not read here: the preparation says the same of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hlat.config.sections import DataConfig
from hlat.data.formats import Vocabulary, content_bytes
from hlat.data.sources import HeldOut, SourceFile, SplitRule, hash_share, hash_threshold
from hlat.runtime import DataError

_MOST_BYTES = 1 << 24  # of files: a few tenths of a second


@dataclass
class SourceSplit:
    """Documents and bytes of a source.

    Attributes:
        name: name or path of the source.
        documents: documents that are not empty.
        held_out: those of them for validation.
        bytes: bytes of all of them.
        held_out_bytes: bytes of those for validation.
        smallest_share: fraction of the corpus above which the first of them is for validation.
    """

    name: str
    documents: int = 0
    held_out: int = 0
    bytes: int = 0
    held_out_bytes: int = 0
    smallest_share: float = 1.0


def split_sources(
    data: DataConfig, files: Mapping[str, Sequence[SourceFile]], vocabulary: Vocabulary | None
) -> list[SourceSplit]:
    """Split each source of a corpus of text; return nothing if it is too large, or documents are not split by hash.

    Args:
        data: the data section.
        files: local files by name of the source.
        vocabulary: vocabulary of the tokenizer; None if it is trained.
    """
    validation, every = data.validation, [file for each in files.values() for file in each]
    is_by_hash = validation.path is None and validation.fraction > 0 and validation.by == "document"
    if not is_by_hash or any(file.cached_store is not None or file.format.holds_tokens for file in every):
        return []
    if sum(file.size for file in every) > _MOST_BYTES:
        return []
    rule, seen = SplitRule(hash_threshold(validation.fraction)), set[bytes]()
    try:
        return [_split(name, each, rule, vocabulary, seen, data) for name, each in files.items()]
    except DataError:  # bad rows and files are the preparation's to report
        return []


def _split(
    name: str,
    files: Sequence[SourceFile],
    rule: SplitRule,
    vocabulary: Vocabulary | None,
    seen: set[bytes],
    data: DataConfig,
) -> SourceSplit:
    found = SourceSplit(name)
    for file in files:
        with file.as_input(Path(file.path), vocabulary) as opened:
            for row in file.format.documents(opened):
                if row.content is None or not len(row.content):
                    continue
                encoded = content_bytes(row.content)
                if data.duplicates == "drop":
                    if encoded in seen:
                        continue
                    seen.add(encoded)
                is_held_out = rule.split_of(encoded) == "validation"
                found.documents += 1
                found.bytes += len(encoded)
                found.held_out += is_held_out
                found.held_out_bytes += len(encoded) * is_held_out
                found.smallest_share = min(found.smallest_share, hash_share(encoded))
    return found


def describe_empty_split(splits: Sequence[SourceSplit]) -> str:
    """Return why the corpus has no validation text, and what would work; empty if it has some."""
    documents = sum(each.documents for each in splits)
    if not documents or any(each.held_out for each in splits):
        return ""
    counted = "the only document of the corpus is not" if documents == 1 else f"none of the {documents:,} documents is"
    share = math.ceil(min(each.smallest_share for each in splits) * 100 + 1e-9) / 100
    larger = f", data.validation.fraction={share:g}, which keeps one aside" if documents > 1 and share < 0.5 else ""
    return (
        f"{counted} chosen for validation. Use data.validation.by=tail, which cuts inside a document{larger}, or "
        "data.validation.fraction=0 for no validation."
    )


def held_out(splits: Sequence[SourceSplit], bytes_per_token: float) -> list[HeldOut]:
    """Estimate the tokens of each source and of its validation text."""
    return [
        HeldOut(
            each.name,
            each.held_out,
            each.documents,
            each.held_out_bytes / bytes_per_token,
            each.bytes / bytes_per_token,
        )
        for each in splits
    ]
