"""Values that processes send to each other are decoded to equal values; any other bytes are rejected."""

import contextlib
import json
import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hlat.evaluation.harness.run
import hlat.launch.training_job
import hlat.training.loop
from hlat.checkpoint.protocol.store import SaveResult
from hlat.config import Problem
from hlat.data.online.loader import StreamProgress
from hlat.data.prepared.manifest import SourceRecord
from hlat.runtime.distributed.sendable_types import SENDABLE
from hlat.runtime.distributed.wire_format import MalformedMessage, decode, encode

TYPES = {
    "Batch", "CheckpointManifest", "CorruptionIncident", "FileRecord", "Fix", "GenerationBatch", "GenerationRequest",
    "LocalBatch", "Mismatch", "PeakFlops", "Problem", "RankPart", "RemoteManifest", "Sampling", "SaveResult", "Score",
    "ScoreRequest", "ScoringBatch", "SnapshotResult", "SourceRecord", "StoredChunk", "StreamProgress", "WriteResult",
    "_Failure",
}  # fmt: skip

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.integers() | st.text() | st.tuples(st.integers(), st.text())
values = st.recursive(
    plain | st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0")).map(Path),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.sets(keys)
        | st.frozensets(keys)
    ),
    max_leaves=20,
)


def typed(value):
    """Pair each value with its type, because 1, 1.0 and True compare equal."""
    if isinstance(value, dict):
        return dict, [(typed(key), typed(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [typed(item) for item in value]
    return type(value), value


@given(values)
def test_plain_values_are_decoded_unchanged(value):
    assert typed(decode(encode(value))) == typed(value)


def test_nan_and_infinity_are_decoded_unchanged():
    nan, high = decode(encode([math.nan, -math.inf]))
    assert math.isnan(nan) and high == -math.inf


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_tensors_keep_bits_shape_and_dtype(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    back = decode(encode({"a": (tensor, dtype)}))["a"]
    assert back[1] is dtype and back[0].dtype is dtype and torch.equal(back[0], tensor) and back[0].shape == shape
    transposed = torch.arange(6.0).view(2, 3).T
    assert torch.equal(decode(encode(transposed)), transposed)


@pytest.mark.parametrize("dtype", ["bool", "i8", "u2", "f4", "f8", ">i4"])
def test_arrays_keep_bits_shape_and_dtype(dtype):
    array = np.arange(12).reshape(3, 4).astype(dtype)
    if dtype.startswith(">"):
        with pytest.raises(TypeError):
            encode(array)
        return
    for one in (array, array.T, array[:, ::2], array[:0]):
        back = decode(encode(one))
        assert back.dtype == one.dtype and np.array_equal(back, one) and back.flags.writeable
    assert decode(encode(array[0, 1])) == array[0, 1]


def test_registered_objects_are_decoded_to_equal_objects():
    source = SourceRecord(path="a", use="split", content=[0, "b", "text"], bytes=3, mtime_ns=4, sha256="c", index=None)
    for one in (
        SaveResult(3, Path("/a"), 0.5, 1),
        Problem("model.heads", "too many", "take 4", 9, True),
        source.model_copy(update={"index": source}),
        [source],
    ):
        assert typed(decode(encode(one))) == typed(one)
    progress = decode(encode(StreamProgress(np.arange(2), np.zeros(2, np.int64), np.ones((2, 3), np.int64))))
    assert type(progress) is StreamProgress and progress.cursors.shape == (2, 3)


def test_exactly_these_types_are_registered():
    """Each registered type is plain data: its constructor opens, calls and imports nothing."""
    assert hlat.evaluation.harness.run and hlat.launch.training_job and hlat.training.loop
    assert set(SENDABLE) == TYPES


@dataclass
class Unregistered:
    """A type that is not registered."""

    step: int = 0


class WriteResult(NamedTuple):
    """An unregistered type with the name of a registered one."""

    files: dict
    blocks: list


@pytest.mark.parametrize(
    "value",
    [
        Unregistered(),
        WriteResult({}, []),
        object(),
        print,
        np.array([object()]),
        torch.zeros(1, device="meta"),
        1j,
        {"a": {1j}},
    ],
    ids=["dataclass", "same name", "object", "function", "objects", "no memory", "complex", "inside"],
)
def test_unregistered_types_are_refused(value):
    with pytest.raises(TypeError, match="cannot be sent between processes"):
        encode(value)


def message(tree, *blobs, lengths=None):
    text = json.dumps([tree, [len(blob) for blob in blobs] if lengths is None else lengths]).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(blobs)


HOSTILE = {
    "nothing": b"",
    "pickle": pickle.dumps([1]),
    "long text": (1 << 62).to_bytes(8, "little") + b"[1,[]]",
    "rest": message(1) + b"x",
    "nested": (200_002).to_bytes(8, "little") + b"[" * 100_001 + b"]" * 100_001,
    "tag": message({"eval": "1"}),
    "two tags": message({"tuple": [], "set": []}),
    "no tag": message({}),
    "type": message({"object": ["Popen", {"args": "id"}]}),
    "path of a type": message({"object": ["subprocess.Popen", {"args": "id"}]}),
    "fields": message({"object": ["SaveResult", {"step": 1}]}),
    "more fields": message({"object": ["Fix", {"path": "a", "value": 1, "more": 1}]}),
    "model": message({"object": ["SourceRecord", {name: {"list": 3} for name in SourceRecord.model_fields}]}),
    "blob": message({"bytes": 1}, b"x"),
    "blob before": message({"bytes": "a"}, b"x"),
    "negative": message({"bytes": 0}, b"x", lengths=[-1]),
    "objects": message({"array": ["O", [1], 0]}, b"12345678"),
    "record": message({"array": ["i8,O", [1], 0]}, b"1234567812345678"),
    "shape": message({"array": ["<i8", [2], 0]}, b"12345678"),
    "huge": message({"tensor": ["float32", [1 << 62], 0]}, b"1234"),
    "minus": message({"tensor": ["float32", [-1], 0]}, b"1234"),
    "dtype": message({"dtype": "nn"}),
    "unhashable": message({"set": [[1]]}),
    "map": message({"map": [1]}),
    "path": message({"path": 3}),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_malformed_messages_are_refused(content):
    with pytest.raises(MalformedMessage):
        decode(content)


@given(st.binary(max_size=80))
def test_random_bytes_are_refused_or_decoded(content):
    for one in (content, len(content).to_bytes(8, "little") + content):
        with contextlib.suppress(MalformedMessage):
            decode(one)
