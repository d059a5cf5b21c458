"""Preparation of a corpus: worker processes tokenize it into token shards, on one machine or on several."""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.data.prepare.corpus import Corpus, SplitPlan
    from hlat.data.prepare.merge_partitions import find_partition_folders, merge_partition_folders
    from hlat.data.prepare.partition import partition_folder, prepare_partition, train_tokenizer
    from hlat.data.prepare.preparation import folder_lock, ignore_progress, prepare, resolve_output_folder
    from hlat.data.prepare.tokenizer_and_split import ProgressCallback, make_tokenizer
    from hlat.data.prepare.verification import verify_and_seal, verify_data

__getattr__ = lazily(
    __name__,
    {
        "corpus": (
            "Corpus",
            "SplitPlan",
        ),
        "merge_partitions": (
            "merge_partition_folders",
            "find_partition_folders",
        ),
        "partition": (
            "partition_folder",
            "prepare_partition",
            "train_tokenizer",
        ),
        "preparation": (
            "resolve_output_folder",
            "folder_lock",
            "prepare",
            "ignore_progress",
        ),
        "tokenizer_and_split": (
            "ProgressCallback",
            "make_tokenizer",
        ),
        "verification": (
            "verify_data",
            "verify_and_seal",
        ),
    },
)

__all__ = [
    "Corpus",
    "ProgressCallback",
    "SplitPlan",
    "find_partition_folders",
    "folder_lock",
    "ignore_progress",
    "make_tokenizer",
    "merge_partition_folders",
    "partition_folder",
    "prepare",
    "prepare_partition",
    "resolve_output_folder",
    "train_tokenizer",
    "verify_and_seal",
    "verify_data",
]
