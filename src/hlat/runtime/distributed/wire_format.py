"""Encoding of values as bytes. Decoding untrusted bytes can only create values of known types; it runs no other code.

    value --encode--> bytes: length, JSON, arrays and bytes one after another --decode--> an equal value

Plain values are themselves in JSON. A type that JSON lacks is an object with one key, its tag. Objects of hlat's own
types are accepted if the type is registered with the decorator ``sendable``; other names are rejected. Decoding imports
nothing, looks up no module attribute, and calls only the constructors of registered types.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from hlat.runtime.backend.device import is_on_host
from hlat.runtime.distributed.sendable_types import SENDABLE

_LENGTH = 8  # bytes
_ARRAYS = {np.dtype(name).str for name in ("bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    )
}


class MalformedMessage(Exception):
    """Bytes that no process of a run would send."""


def encode(value: object) -> bytes:
    """Encode a value as bytes; TypeError for types that are not allowed.

    Allowed are None, bool, int, float, str, bytes, list, tuple, set, frozenset, mapping, path, NumPy arrays and
    scalars, tensors on the CPU, torch dtypes, ``sendable`` objects, and nestings of these.
    """
    blobs: list[bytes] = []
    tree = _to_json(value, blobs)
    # Binary content stays out of JSON.
    text = json.dumps([tree, [len(blob) for blob in blobs]], separators=(",", ":")).encode()
    return b"".join((len(text).to_bytes(_LENGTH, "little"), text, *blobs))


def decode(message: bytes) -> Any:
    """Decode a message of ``encode``; mappings become dict, paths Path, NumPy scalars numbers.

    Raises:
        MalformedMessage: ``encode`` did not produce these bytes.
    """
    try:
        begin = _LENGTH + int.from_bytes(message[:_LENGTH], "little")
        tree, lengths = json.loads(message[_LENGTH:begin])
        blobs = []
        for length in lengths:
            _expect(type(length) is int and 0 <= length <= len(message) - begin)
            blobs.append(message[begin : begin + length])
            begin += length
        _expect(begin == len(message))
        return _read(tree, blobs)
    except MalformedMessage:
        raise
    except Exception as error:  # malformed bytes can raise any exception
        raise MalformedMessage(repr(error)) from error


def _expect(holds: bool) -> None:
    if not holds:
        raise MalformedMessage("its sections do not fit together")


def _to_json(value: object, blobs: list[bytes]) -> Any:
    # By identity of the type: a foreign class of the same name is rejected.
    kind, names = SENDABLE.get(type(value).__name__, (None, ()))
    if type(value) is kind:
        return {"object": [kind.__name__, {name: _to_json(getattr(value, name), blobs) for name in names}]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) is list:
        return [_to_json(item, blobs) for item in value]
    if isinstance(value, np.generic):
        return _to_json(value.item(), blobs)
    return _tagged(value, blobs)


def _tagged(value: object, blobs: list[bytes]) -> dict[str, Any]:
    for tag, collection in _COLLECTIONS.items():
        if type(value) is collection:
            return {tag: [_to_json(item, blobs) for item in value]}  # type: ignore[attr-defined]  # all are iterable
    match value:
        case Mapping():
            tagged: dict[str, Any] = {
                "map": [[_to_json(key, blobs), _to_json(item, blobs)] for key, item in value.items()]
            }
        case PurePath():
            tagged = {"path": str(value)}
        case torch.dtype():
            tagged = {"dtype": _name(value)}
        case bytes():
            tagged = {"bytes": _append_blob(value, blobs)}
        case np.ndarray() if value.dtype.str in _ARRAYS:
            tagged = {"array": [value.dtype.str, list(value.shape), _append_blob(value.tobytes(), blobs)]}
        case torch.Tensor() if is_on_host(value):
            content = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            tagged = {"tensor": [_name(value.dtype), list(value.shape), _append_blob(content, blobs)]}
        case _:
            raise TypeError(f"a {type(value).__qualname__} cannot be sent between processes")
    return tagged


def _append_blob(content: bytes, blobs: list[bytes]) -> int:
    blobs.append(content)
    return len(blobs) - 1


def _name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise TypeError(f"{dtype} cannot be sent between processes")
    return name


def _read(tree: Any, blobs: list[bytes]) -> Any:
    if isinstance(tree, list):
        return [_read(item, blobs) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((tag, content),) = tree.items()
    if tag in _COLLECTIONS:
        _expect(isinstance(content, list))
        return _COLLECTIONS[tag](_read(item, blobs) for item in content)
    return _READERS[tag](content, blobs)


def _read_array(content: Any, blobs: list[bytes]) -> Any:
    name, shape, index = content
    _expect(name in _ARRAYS)
    return np.frombuffer(bytearray(blobs[index]), dtype=name).reshape(_shape(shape))


def _read_tensor(content: Any, blobs: list[bytes]) -> torch.Tensor:
    name, shape, index = content
    flat = torch.from_numpy(np.frombuffer(bytearray(blobs[index]), dtype=np.uint8))
    return flat.view(_DTYPES[name]).view(_shape(shape))


def _shape(shape: Any) -> list[int]:
    _expect(isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape))
    return list(shape)


def _read_object(content: Any, blobs: list[bytes]) -> Any:
    name, values = content
    kind, names = SENDABLE[name]
    _expect(isinstance(values, dict) and tuple(values) == names)
    return kind(**{field: _read(value, blobs) for field, value in values.items()})


_COLLECTIONS: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_READERS: dict[str, Callable[[Any, list[bytes]], Any]] = {
    "map": lambda content, blobs: {_read(key, blobs): _read(item, blobs) for key, item in content},
    "path": lambda content, blobs: Path(content),
    "dtype": lambda content, blobs: _DTYPES[content],
    "bytes": lambda content, blobs: blobs[content],
    "array": _read_array,
    "tensor": _read_tensor,
    "object": _read_object,
}
