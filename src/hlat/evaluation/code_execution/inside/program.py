"""Process of the program: runs what a model wrote, and then answers the calls of the tests.

    source -> module __main__ -> (operation, operands) -> reply: the value, or the exception

It has neither the tests nor the descriptor of the verdict, so that all it can do to them is to answer.
"""

import operator
import os
import sys
from typing import Any

from .values import from_bytes, read_frame, to_bytes, write_frame


def serve(source: str, requests: int, replies: int) -> None:
    """Run a program; then answer requests, for ever.

    Args:
        source: the program.
        requests: file descriptor to read from.
        replies: file descriptor to write to.
    """
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
            kinds = [kind.__name__ for kind in type(error).__mro__]
            reply = to_bytes(("raised", kinds, str(error)), refer)
        write_frame(replies, reply)


def _answer(module: Any, request: tuple[Any, ...], refer: Any) -> bytes:
    what, *operands = request
    if what == "ended":
        return to_bytes(("value", operands[0], None), refer)
    if what == "name":
        if operands[0] not in module.__dict__:
            return to_bytes(("missing",), refer)
        value = module.__dict__[operands[0]]
        return to_bytes(("module", value.__name__) if isinstance(value, type(os)) else ("value", value, None), refer)
    if what == "call":
        function, arguments, named = operands
        before = to_bytes(arguments, refer)
        value = function(*arguments, **named)
        changed = arguments if to_bytes(arguments, refer) != before else None  # as of a function that sorts in place
        return to_bytes(("value", value, changed), refer)
    apply: Any = {"get": getattr, "set": setattr, "items": list, "item": operator.getitem, "length": len}[what]
    return to_bytes(("value", apply(*operands), None), refer)
