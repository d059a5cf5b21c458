"""Text becomes samples: sources -> documents -> tokens -> shards -> samples addressed by a global index.

    remote, cache         URLs -> files on this machine
    sources, readers      files -> documents (endings, tables, lines, records; token_documents: those that are tokens)
    tokenizer, training   documents <-> token ids
    preparation, staging  documents -> token shards and a manifest, by worker processes, restartable
    parts, joining        the same by several machines
    duplicates            which documents are copies
    quarantine            which rows cannot be read, and how many may be
    prepared              a folder of shards, opened
    verification, summary everything in it checked, or told
    samples, mixture      global sample index -> source -> row -> tokens, a pure function
    online                documents -> samples while training, by processes of their own

The names are resolved on first use: a worker process that only tokenizes (hlat.data.worker) then starts without
importing torch, which would cost more than tokenizing a small corpus.
"""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.data.manifest import Manifest
    from hlat.data.online.data import OnlineData
    from hlat.data.online.feed import Cursors, OnlineFeed, StreamProgress
    from hlat.data.online.setup import prepare_online
    from hlat.data.order import permute
    from hlat.data.planning import Progress
    from hlat.data.preparation import prepare
    from hlat.data.prepared import Prepared, check_tokenizer, check_vocabulary, open_prepared
    from hlat.data.readiness import make_ready
    from hlat.data.samples import Batch, TrainingData, ValidationData
    from hlat.data.summary import Summary, summarize
    from hlat.data.tokenizer import Tokenizer
    from hlat.data.tokenizer_loading import load_tokenizer
    from hlat.data.verification import verify, verify_and_seal
    from hlat.model import IGNORED

_MODULES = {
    "joining": (
        "merge_parts",
        "parts_beside",
    ),
    "manifest": ("Manifest",),
    "online.data": ("OnlineData",),
    "online.feed": (
        "Cursors",
        "OnlineFeed",
        "StreamProgress",
    ),
    "online.setup": ("prepare_online",),
    "order": ("permute",),
    "parts": (
        "PartRecord",
        "part_folder",
        "prepare_part",
        "train_tokenizer",
    ),
    "planning": ("Progress",),
    "preparation": ("prepare",),
    "prepared": (
        "Prepared",
        "check_tokenizer",
        "check_vocabulary",
        "open_prepared",
    ),
    "readiness": ("make_ready",),
    "samples": (
        "Batch",
        "IGNORED",
        "TrainingData",
        "ValidationData",
    ),
    "summary": (
        "Summary",
        "summarize",
    ),
    "tokenizer": ("Tokenizer",),
    "tokenizer_loading": ("load_tokenizer",),
    "verification": (
        "verify",
        "verify_and_seal",
    ),
}

__all__ = [
    "IGNORED",
    "Batch",
    "Cursors",
    "Manifest",
    "OnlineData",
    "OnlineFeed",
    "PartRecord",
    "Prepared",
    "Progress",
    "StreamProgress",
    "Summary",
    "Tokenizer",
    "TrainingData",
    "ValidationData",
    "check_tokenizer",
    "check_vocabulary",
    "load_tokenizer",
    "make_ready",
    "merge_parts",
    "open_prepared",
    "part_folder",
    "parts_beside",
    "permute",
    "prepare",
    "prepare_online",
    "prepare_part",
    "summarize",
    "train_tokenizer",
    "verify",
    "verify_and_seal",
]


__getattr__ = lazily(__name__, _MODULES)
