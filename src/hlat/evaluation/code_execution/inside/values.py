"""Values as bytes, between the tests and the program: plain values are copied, anything else is named by a number.

    value <-> one letter for its type, length of the body, colon, body

Reading makes plain values only and runs no code of the sender, as unpickling would. ``json`` has no tuples and sets,
and its import takes as long as the start of Python.
"""

import os
from collections.abc import Callable
from typing import Any

Refer = Callable[[Any], int]
Resolve = Callable[[int], Any]

_TEXT = ("utf-8", "surrogatepass")
_SCALARS: tuple[tuple[bytes, type, Callable[[Any], bytes], Callable[[bytes], Any]], ...] = (
    (b"n", type(None), lambda value: b"", lambda body: None),
    (b"t", bool, lambda value: b"%d" % value, lambda body: body == b"1"),
    (b"i", int, lambda value: hex(value).encode(), lambda body: int(body, 16)),  # decimal digits have a limit
    (b"s", str, lambda value: value.encode(*_TEXT), lambda body: body.decode(*_TEXT)),
    (b"f", float, lambda value: repr(float(value)).encode(), float),
    (b"c", complex, lambda value: repr(complex(value)).encode(), lambda body: complex(body.decode())),
    (b"b", bytes, bytes, bytes),
    (b"y", bytearray, bytes, bytearray),
)
_COLLECTIONS: dict[bytes, type] = {b"l": list, b"u": tuple, b"e": set, b"z": frozenset, b"d": dict}
_STEPS: dict[bytes, Any] = {b"S": slice, b"r": range}  # start, stop, step
_EXACT = {b"D": ("decimal", "Decimal"), b"R": ("fractions", "Fraction")}  # compared with floats and ints by some tests
_READERS = {kind: read for kind, _, _, read in _SCALARS}


def to_bytes(value: Any, refer: Refer) -> bytes:
    """Return a value as bytes. A subclass of a plain type becomes that type: its own comparisons stay behind."""
    kind, body = _parts(value, refer)
    return b"%s%d:%s" % (kind, len(body), body)


def _parts(value: Any, refer: Refer) -> tuple[bytes, bytes]:
    for kind, scalar, write, _ in _SCALARS:
        if isinstance(value, scalar):
            return kind, write(value)
    for kind, collection in _COLLECTIONS.items():
        if isinstance(value, collection):
            items: Any = [item for pair in value.items() for item in pair] if isinstance(value, dict) else value
            return kind, b"".join(to_bytes(item, refer) for item in items)
    for kind, steps in _STEPS.items():
        if isinstance(value, steps):
            return kind, b"".join(to_bytes(item, refer) for item in (value.start, value.stop, value.step))
    for kind, name in _EXACT.items():
        if (type(value).__module__, type(value).__name__) == name:
            return kind, str(value).encode()
    return b"o", b"%d" % refer(value)


def from_bytes(data: bytes, resolve: Resolve) -> Any:
    """Return the value of some bytes; raises ValueError if they are none."""
    (value,) = _all_values(data, resolve)
    return value


def _all_values(data: bytes, resolve: Resolve) -> list[Any]:
    values, begin = [], 0
    while begin < len(data):
        colon = data.index(b":", begin)
        end = colon + 1 + int(data[begin + 1 : colon])
        if not colon < end <= len(data):
            raise ValueError("a value ends outside its message")
        values.append(_value(data[begin : begin + 1], data[colon + 1 : end], resolve))
        begin = end
    return values


def _value(kind: bytes, body: bytes, resolve: Resolve) -> Any:
    if kind in _READERS:
        return _READERS[kind](body)
    if kind in _COLLECTIONS:
        items = _all_values(body, resolve)
        return _COLLECTIONS[kind](zip(items[::2], items[1::2], strict=True) if kind == b"d" else items)
    if kind in _STEPS:
        return _STEPS[kind](*_all_values(body, resolve))
    if kind in _EXACT:
        module, name = _EXACT[kind]
        return getattr(__import__(module), name)(body.decode())
    if kind == b"o":
        return resolve(int(body))
    raise ValueError(f"no value has the letter {kind!r}")


def write_frame(file: int, data: bytes) -> None:
    """Write bytes to a file descriptor, after their number."""
    view = memoryview(frame(data))
    while view:
        view = view[os.write(file, view) :]


def frame(data: bytes) -> bytes:
    """Return bytes with their number in front, as ``read_frame`` expects them."""
    return len(data).to_bytes(8, "big") + data


def read_frame(file: int) -> bytes:
    """Read what ``write_frame`` wrote, and not a byte more; raises EOFError if the other side is gone."""
    return _read(file, int.from_bytes(_read(file, 8), "big"))


def _read(file: int, count: int) -> bytes:
    parts, missing = [], count
    while missing:
        part = os.read(file, min(missing, 1 << 16))
        if not part:
            raise EOFError
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
