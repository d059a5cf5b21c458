"""Text becomes samples: sources -> documents -> tokens -> shards -> samples addressed by a global index.

    remote, cache         URLs -> files on this machine
    sources, readers      files -> documents
    tokenizer, training   documents <-> token ids
    preparation, staging  documents -> token shards and a manifest, by worker processes, restartable
    prepared              a folder of shards, opened and verified
    samples, mixture      global sample index -> source -> row -> tokens, a pure function
    online                documents -> samples while training, by processes of their own

The names are resolved on first use: a worker process that only tokenizes (hlat.data.worker) then starts without
importing torch, which would cost more than tokenizing a small corpus.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hlat.data.online.data import OnlineData
    from hlat.data.online.feed import Cursors, OnlineFeed, StreamProgress
    from hlat.data.online.setup import prepare_online
    from hlat.data.order import permute
    from hlat.data.preparation import Progress, prepare
    from hlat.data.prepared import Manifest, Prepared, check_tokenizer, check_vocabulary, open_prepared, verify
    from hlat.data.samples import Batch, TrainingData, ValidationData
    from hlat.data.tokenizer import Tokenizer, load_tokenizer
    from hlat.model import IGNORED

_HOME = {
    "IGNORED": "samples",
    "Batch": "samples",
    "Cursors": "online.feed",
    "Manifest": "prepared",
    "OnlineData": "online.data",
    "OnlineFeed": "online.feed",
    "Prepared": "prepared",
    "Progress": "preparation",
    "StreamProgress": "online.feed",
    "Tokenizer": "tokenizer",
    "TrainingData": "samples",
    "ValidationData": "samples",
    "check_tokenizer": "prepared",
    "check_vocabulary": "prepared",
    "load_tokenizer": "tokenizer",
    "open_prepared": "prepared",
    "permute": "order",
    "prepare": "preparation",
    "prepare_online": "online.setup",
    "verify": "prepared",
}

__all__ = [
    "IGNORED",
    "Batch",
    "Cursors",
    "Manifest",
    "OnlineData",
    "OnlineFeed",
    "Prepared",
    "Progress",
    "StreamProgress",
    "Tokenizer",
    "TrainingData",
    "ValidationData",
    "check_tokenizer",
    "check_vocabulary",
    "load_tokenizer",
    "open_prepared",
    "permute",
    "prepare",
    "prepare_online",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
