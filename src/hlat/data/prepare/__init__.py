"""Preparation: a corpus becomes token shards, by worker processes on one machine or several."""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.data.prepare.corpus import Corpus, SplitPlan
    from hlat.data.prepare.merge_partitions import merge_parts, parts_beside
    from hlat.data.prepare.partition import part_folder, prepare_part, train_tokenizer
    from hlat.data.prepare.preparation import checked_folder, locked, prepare, silent
    from hlat.data.prepare.tokenizer_and_split import Progress, make_tokenizer
    from hlat.data.prepare.verification import verify, verify_and_seal

__getattr__ = lazily(
    __name__,
    {
        "corpus": (
            "Corpus",
            "SplitPlan",
        ),
        "merge_partitions": (
            "merge_parts",
            "parts_beside",
        ),
        "partition": (
            "part_folder",
            "prepare_part",
            "train_tokenizer",
        ),
        "preparation": (
            "checked_folder",
            "locked",
            "prepare",
            "silent",
        ),
        "tokenizer_and_split": (
            "Progress",
            "make_tokenizer",
        ),
        "verification": (
            "verify",
            "verify_and_seal",
        ),
    },
)

__all__ = [
    "Corpus",
    "Progress",
    "SplitPlan",
    "checked_folder",
    "locked",
    "make_tokenizer",
    "merge_parts",
    "part_folder",
    "parts_beside",
    "prepare",
    "prepare_part",
    "silent",
    "train_tokenizer",
    "verify",
    "verify_and_seal",
]
