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

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    from hlat.data.tokenizer import Tokenizer, load_tokenizer
    from hlat.data.verification import verify
    from hlat.model import IGNORED

_HOME = {
    "Batch": "samples",
    "Cursors": "online.feed",
    "IGNORED": "samples",
    "Manifest": "manifest",
    "OnlineData": "online.data",
    "OnlineFeed": "online.feed",
    "PartRecord": "parts",
    "Prepared": "prepared",
    "Progress": "planning",
    "StreamProgress": "online.feed",
    "Summary": "summary",
    "Tokenizer": "tokenizer",
    "TrainingData": "samples",
    "ValidationData": "samples",
    "check_tokenizer": "prepared",
    "check_vocabulary": "prepared",
    "load_tokenizer": "tokenizer",
    "make_ready": "readiness",
    "merge_parts": "joining",
    "open_prepared": "prepared",
    "part_folder": "parts",
    "parts_beside": "joining",
    "permute": "order",
    "prepare": "preparation",
    "prepare_online": "online.setup",
    "prepare_part": "parts",
    "summarize": "summary",
    "train_tokenizer": "parts",
    "verify": "verification",
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
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
