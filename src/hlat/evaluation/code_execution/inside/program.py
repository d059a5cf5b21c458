"""Process of the program: runs what a model wrote, and then answers the calls of the tests.

    source -> module __main__ -> (operation, operands) -> reply: the value, or the exception

It has neither the tests nor the descriptor of the verdict, so that all it can do to them is to answer.
"""

import operator
import os
import sys
from collections.abc import Callable
from typing import Any

from .values import from_bytes, read_frame, to_bytes, write_frame


def serve(source: str, requests: int, replies: int) -> None:
    """Run a program; then answer requests, for ever, through two file descriptors."""
    module = sys.modules["__main__"] = type(sys)("__main__")
    exec(compile(source, "<generated>", "exec"), module.__dict__)
    kept: dict[int, Any] = {}  # by id; they stay alive, so that no id is given twice

    def refer(value: Any) -> int:
        kept[id(value)] = value
        return id(value)

    while True:
        request = from_bytes(read_frame(requests), kept.__getitem__)
        try:
            reply = _answer(module, request, refer)
        except BaseException as error:
            reply = ("raised", [kind.__name__ for kind in type(error).__mro__], _text(error))
        # What cannot be written, as a list that contains itself, ends the program: nothing in it raised an exception.
        write_frame(replies, to_bytes(reply, refer))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # of its own __str__
        return ""


def _answer(module: Any, request: tuple[Any, ...], refer: Any) -> tuple[Any, ...]:
    what, *operands = request
    if what == "ended":
        return "value", operands[0], None
    if what == "name":
        if operands[0] not in module.__dict__:
            return ("missing",)
        value = module.__dict__[operands[0]]
        return ("module", value.__name__) if isinstance(value, type(os)) else ("value", value, None)
    if what == "call":
        function, arguments, named = operands
        before = to_bytes(arguments, refer)
        value = function(*arguments, **named)
        changed = arguments if to_bytes(arguments, refer) != before else None  # as of a function that sorts in place
        return "value", value, changed
    return "value", _OPERATIONS[what](*operands), None


def _next(iterator: Any) -> list[Any]:
    try:
        # A list, empty at the end, which no exception can say: functions raise StopIteration too.
        return [next(iterator)]
    except StopIteration:
        return []


_OPERATIONS: dict[str, Callable[..., Any]] = {"get": getattr, "set": setattr, "item": operator.getitem, "length": len}
_OPERATIONS |= {"truth": bool, "iterator": iter, "next": _next}
