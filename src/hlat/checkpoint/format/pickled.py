"""Read a pickle as plain values. Nothing that it names is imported, and nothing is called.

    bytes --read_pickle--> dict, list, tuple, str, int, float, bool, None
                           PickledName     for a class or a function that the pickle names
                           PickledObject   for a call: the name, the arguments, and the state set afterwards

A pickle is a program for a stack machine (documented by ``pickletools`` in Python's standard library). The machine here
is Python's own, with the opcodes that ``pickle.dumps`` writes for data, in protocols 2 to 5; it refuses all others.
"""

import io
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from hlat.runtime.errors import CheckpointError


@dataclass(frozen=True, eq=False)
class PickledName:
    """A class or a function that a pickle names, as ``module.name``."""

    text: str

    def __call__(self, *arguments: Any) -> "PickledObject":
        return PickledObject(self.text, arguments)

    def __setstate__(self, state: Any) -> NoReturn:
        raise ValueError("BUILD applied to a name")


@dataclass(eq=False, slots=True)
class PickledObject:
    """An object that unpickling would create: ``name(*arguments)``, then ``state`` set on it (None if not set)."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None

    def __setstate__(self, state: Any) -> None:
        if self.state is not None:
            raise ValueError("BUILD applied twice")
        self.state = state


def read_pickle(data: bytes, is_known: Callable[[str], bool]) -> Any:
    """Read the value that a pickle describes, in time and memory proportional to its length.

    Values may be shared, and a list may contain itself: callers must not recurse deeper than the structure they expect.
    CheckpointError for a name that is not known; ValueError for damage or opcodes that plain data does not need.
    """
    try:
        return _Machine(data, is_known).load()
    except _DAMAGE as error:
        kind = type(error).__name__
        raise ValueError(f"truncated, a value is missing, or an opcode that plain data does not use: {kind}") from None


_STOP: Any = pickle._Stop  # type: ignore[attr-defined]
_DAMAGE = (AttributeError, IndexError, KeyError, TypeError, ValueError, pickle.UnpicklingError, struct.error)
_PLAIN = (
    *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.BUILD),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
)


_PythonsMachine: Any = pickle._Unpickler  # typeshed knows a part of it


class _Machine(_PythonsMachine):  # type: ignore[misc]
    """Python's stack machine for plain data. A name stays a name, and calling it makes an object that says so."""

    # Not its twin in C, ``pickle.Unpickler``, which allocates a memo as large as the largest key of it, and hashes any
    # key of a dictionary.
    def __init__(self, data: bytes, is_known: Callable[[str], bool]) -> None:
        stream = io.BytesIO(data)
        super().__init__(stream)
        self._is_known = is_known
        # Past Python's reader of frames, which would take half of the time: all of the data is in memory.
        self.read, self.readline = stream.read, stream.readline
        self.stack: list[Any] = []
        self.metastack: list[list[Any]] = []
        self.append = self.stack.append

    def load(self) -> Any:
        try:
            while True:
                self.dispatch[self.read(1)[0]](self)
        except _STOP as stop:
            return stop.value

    def find_class(self, module: str, name: str) -> PickledName:
        text = f"{module}.{name}"
        if not self._is_known(text):
            raise CheckpointError(f"it names {text[:200]!r}, which no index of tensors needs; nothing was run")
        return PickledName(text)

    def skip_length_of_frame(self) -> None:
        self.read(8)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items((key, value))

    def set_items(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, values: Sequence[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict:
            raise ValueError("an item is set in a value that is not a dictionary")
        for key, value in zip(values[::2], values[1::2], strict=True):
            # A list is not hashable, and a tuple of shared tuples may take exponential time to hash.
            if type(key) is not str and type(key) is not PickledObject:
                raise ValueError("a key is neither a string nor an object")
            target[key] = value

    dispatch: ClassVar[dict[int, Any]] = {
        **{opcode[0]: _PythonsMachine.dispatch[opcode[0]] for opcode in _PLAIN},
        pickle.FRAME[0]: skip_length_of_frame,
        pickle.SETITEM[0]: set_item,
        pickle.SETITEMS[0]: set_items,
        pickle.NEWOBJ[0]: _PythonsMachine.dispatch[pickle.REDUCE[0]],  # a class is called, as a function is
    }
