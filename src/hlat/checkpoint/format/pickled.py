"""Read a pickle as plain values. Nothing that it names is imported, and nothing is called.

    bytes --read_pickle--> dict, list, tuple, str, int, float, bool, None
                           PickledName     for a class or a function that the pickle names
                           PickledObject   for a call: the name, the arguments, and the state set afterwards

A pickle is a program for a stack machine (documented by ``pickletools`` in Python's standard library). This machine
has the opcodes that ``pickle.dumps`` writes for data, in protocols 2 to 5, and refuses all others.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hlat.runtime.errors import CheckpointError


@dataclass(frozen=True, eq=False, slots=True)
class PickledName:
    """A class or a function that a pickle names, as ``module.name``."""

    text: str


@dataclass(eq=False, slots=True)
class PickledObject:
    """An object that unpickling would create: ``name(*arguments)``, then ``state`` set on it (None if not set)."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


def read_pickle(data: bytes, is_known: Callable[[str], bool]) -> Any:
    """Read the value that a pickle describes, in time and memory proportional to its length.

    Values may be shared, and a list may contain itself: callers must not recurse deeper than the structure they expect.
    CheckpointError for a name that is not known; ValueError for damage or opcodes that plain data does not need.
    """
    machine = _Machine(data, is_known)
    try:
        return _run(machine, data)
    except (IndexError, KeyError, struct.error):
        raise ValueError(
            f"at byte {machine.at}: truncated, a value is missing, or an opcode that plain data does not use"
        ) from None


def _run(machine: "_Machine", data: bytes) -> Any:
    # The most frequent opcodes, half of all, are inlined here to save function calls.
    at, stack, memo, number = 0, machine.stack, machine.memo, _U32.unpack_from
    while True:
        code = data[at]
        at += 1
        if code == _MEMOIZE:
            memo[len(memo)] = stack[-1]
        elif code == _LONG_BINGET:
            stack.append(memo[number(data, at)[0]])
            at += 4
        elif code == _BINGET:
            stack.append(memo[data[at]])
            at += 1
        elif code == _STOP:
            return stack.pop()
        else:
            machine.at = at
            _STEPS[code](machine)
            at, stack = machine.at, machine.stack


class _Machine:
    """State of the stack machine: position, stack, stacks below open marks, and memo."""

    __slots__ = ("at", "below", "data", "is_known", "memo", "stack")

    def __init__(self, data: bytes, is_known: Callable[[str], bool]) -> None:
        self.data, self.at, self.is_known = data, 0, is_known
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        # A dictionary: an entry with a large key takes no more memory than any other.
        self.memo: dict[int, Any] = {}

    def unsigned(self, form: struct.Struct) -> int:
        (number,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return int(number)

    def bytes(self, count: int) -> bytes:
        end = self.at + count
        # A slice would be short without an error.
        if end > len(self.data):
            raise IndexError
        found = self.data[self.at : end]
        self.at = end
        return found

    def pop(self, count: int) -> tuple[Any, ...]:
        stack = self.stack
        # A negative start would take values from the end.
        if len(stack) < count:
            raise IndexError
        values = tuple(stack[len(stack) - count :])
        del stack[len(stack) - count :]
        return values

    def pop_mark(self) -> list[Any]:
        values, self.stack = self.stack, self.below.pop()
        return values


_U8, _U16, _U32, _U64 = (struct.Struct(form) for form in ("<B", "<H", "<I", "<Q"))
_I32, _F64 = struct.Struct("<i"), struct.Struct(">d")


def _mark(it: _Machine) -> None:
    it.below.append(it.stack)
    it.stack = []


def _protocol(it: _Machine) -> None:
    if (version := it.unsigned(_U8)) > 5:
        raise ValueError(f"unknown pickle protocol {version}")


def _constant(value: Any) -> Callable[[_Machine], None]:
    return lambda it: it.stack.append(value)


def _number(form: struct.Struct) -> Callable[[_Machine], None]:
    def step(it: _Machine) -> None:
        it.stack.append(form.unpack_from(it.data, it.at)[0])
        it.at += form.size

    return step


def _long(it: _Machine) -> None:
    it.stack.append(int.from_bytes(it.bytes(it.unsigned(_U8)), "little", signed=True))


def _text(form: struct.Struct) -> Callable[[_Machine], None]:
    # surrogatepass, as pickle itself writes text.
    return lambda it: it.stack.append(it.bytes(it.unsigned(form)).decode("utf-8", "surrogatepass"))


def _tuple(it: _Machine) -> None:
    values = tuple(it.pop_mark())
    it.stack.append(values)


def _short_tuple(count: int) -> Callable[[_Machine], None]:
    return lambda it: it.stack.append(it.pop(count))


def _append(it: _Machine, values: Sequence[Any]) -> None:
    target = it.stack[-1]
    if type(target) is not list:
        raise ValueError("an item is appended to a value that is not a list")
    target.extend(values)


def _set_items(it: _Machine, values: Sequence[Any]) -> None:
    target = it.stack[-1]
    if type(target) is not dict or len(values) % 2:
        raise ValueError("an item is set in a value that is not a dictionary")
    for at in range(0, len(values), 2):
        key = values[at]
        # A list is not hashable, and a tuple of shared tuples may take exponential time to hash.
        if type(key) is not str and type(key) is not PickledObject:
            raise ValueError("a key is neither a string nor an object")
        target[key] = values[at + 1]


def _name(it: _Machine, module: Any, attribute: Any) -> None:
    if type(module) is not str or type(attribute) is not str:
        raise ValueError("a name is not a string")
    text = f"{module}.{attribute}"
    if not it.is_known(text):
        raise CheckpointError(f"it names {text[:200]!r}, which no index of tensors needs; nothing was run")
    it.stack.append(PickledName(text))


def _global(it: _Machine) -> None:
    lines = []
    for _ in range(2):
        if (end := it.data.find(b"\n", it.at)) < 0:
            raise IndexError
        lines.append(it.bytes(end - it.at).decode())
        it.at += 1
    _name(it, *lines)


def _call(it: _Machine) -> None:
    arguments, function = it.stack.pop(), it.stack.pop()
    if type(function) is not PickledName or type(arguments) is not tuple:
        raise ValueError("a call of something that is not a name")
    it.stack.append(PickledObject(function.text, arguments))


def _give_state(it: _Machine) -> None:
    state, target = it.stack.pop(), it.stack[-1]
    if type(target) is not PickledObject or target.state is not None:
        raise ValueError("BUILD applied to something other than a new object, or applied twice")
    target.state = state


def _put(form: struct.Struct) -> Callable[[_Machine], None]:
    def step(it: _Machine) -> None:
        it.memo[it.unsigned(form)] = it.stack[-1]

    return step


_STOP, _MEMOIZE, _BINGET, _LONG_BINGET = ord("."), 0x94, ord("h"), ord("j")
_STEPS: dict[int, Callable[[_Machine], Any]] = {
    0x80: _protocol,
    0x95: lambda it: it.bytes(8),  # frame length, for readers that read ahead; all of the data is in memory
    ord("("): _mark,
    ord("N"): _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    ord("J"): _number(_I32),
    ord("K"): _number(_U8),
    ord("M"): _number(_U16),
    0x8A: _long,
    ord("G"): _number(_F64),
    ord("X"): _text(_U32),
    0x8C: _text(_U8),
    0x8D: _text(_U64),
    ord(")"): _constant(()),
    ord("t"): _tuple,
    0x85: _short_tuple(1),
    0x86: _short_tuple(2),
    0x87: _short_tuple(3),
    ord("]"): lambda it: it.stack.append([]),
    ord("a"): lambda it: _append(it, it.pop(1)),
    ord("e"): lambda it: _append(it, it.pop_mark()),
    ord("}"): lambda it: it.stack.append({}),
    ord("s"): lambda it: _set_items(it, it.pop(2)),
    ord("u"): lambda it: _set_items(it, it.pop_mark()),
    ord("c"): _global,
    0x93: lambda it: _name(it, *it.pop(2)),
    ord("R"): _call,
    0x81: _call,
    ord("b"): _give_state,
    ord("q"): _put(_U8),
    ord("r"): _put(_U32),
}
