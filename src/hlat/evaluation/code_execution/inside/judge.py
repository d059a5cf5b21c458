"""Process of the tests: confines itself, forks the process of the program, runs the tests and says if they pass.

standard input: limits, program --fork--> program.py
tests -> run here; names that they do not define are those of the program, called through a pipe
-> "passed" on standard output, of which the program has no descriptor
"""

import builtins
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from .confine import drop_rights, end_with_parent, limit_resources, restrict_calls, restrict_files
from .program import serve
from .values import from_bytes, read_frame, to_bytes, write_frame

_RAISED = "_raised_by_the_program"  # attribute of exceptions
_ENDS = (StopIteration, StopAsyncIteration, GeneratorExit)


class _Program:
    """The program in the other process, which answers one request after the other through two pipes."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = requests, replies
        self._named: set[_Object] = set()

    def ask(self, *request: Any) -> list[Any]:
        try:
            words = to_bytes(request, _number)
        except _CannotBePassedError:
            if request[0] == "call" and request[1] in self._named:
                raise
            os._exit(1)  # the program returned another object than the tests expect, as one with its own sort(key)
        try:
            write_frame(self._requests, words)
            what, *reply = from_bytes(read_frame(self._replies), self._object)
        except BaseException:  # also of memory: the rest of this answer would be taken for the next one
            os._exit(1)  # no exception, which the tests could take for one of the function under test
        if what == "raised":
            raise _exception(*reply)
        return [what, *reply]

    def find(self, name: str) -> list[Any]:
        reply = self.ask("name", name)
        self._named.update(each for each in reply if isinstance(each, _Object))
        return reply

    def value(self, *request: Any) -> Any:
        _, value, _ = self.ask(*request)
        return value

    def call(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        _, value, changed = self.ask("call", function, list(arguments), named)
        # What the program did to copies of its arguments is done to these.
        for old, new in zip(arguments, changed or (), strict=False):
            if isinstance(old, (list, bytearray)):
                old[:] = new
            elif isinstance(old, (dict, set)):
                old.clear()
                old.update(new)
        return value

    def _object(self, number: int) -> "_Object":
        return _Object(self, number)


class _Object:
    """Object of the program that is no plain value. It equals itself only, whatever its class says."""

    def __init__(self, program: _Program, number: int) -> None:
        object.__setattr__(self, "_place", (program, number))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._place[0].call(self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        return self._place[0].value("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._place[0].ask("set", self, name, value)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._place[0].value("iterator", self)
        return iterator if isinstance(iterator, _Object) else iter(iterator)

    def __next__(self) -> Any:
        for item in self._place[0].value("next", self):
            return item
        raise StopIteration

    def __getitem__(self, key: Any) -> Any:
        return self._place[0].value("item", self, key)

    def __len__(self) -> int:
        length: int = self._place[0].value("length", self)
        return length

    def __bool__(self) -> bool:
        truth: bool = self._place[0].value("truth", self)
        return truth

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self._place == other._place

    def __hash__(self) -> int:
        return hash(self._place[1])


class _Names(dict[str, Any]):
    """Global names of the tests: their own, then Python's, then the program's, which so can replace no other."""

    def __init__(self, program: _Program) -> None:
        super().__init__(__name__="__main__")
        self._program = program

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        kind, *found = self._program.find(name)
        if kind == "module" and str(found[0]).partition(".")[0] in sys.stdlib_module_names:
            __import__(found[0])  # that of this process, which the program has not changed
            return sys.modules[found[0]]
        if kind != "value":
            raise KeyError(name)
        return found[0]


class _CannotBePassedError(BaseException):
    """A value of the tests that cannot be passed to the program; no Exception, so that no test takes it for one."""


def _number(value: Any) -> int:
    if isinstance(value, _Object):
        number: int = value._place[1]
        return number
    if isinstance(value, BaseException) and hasattr(value, _RAISED):
        os._exit(1)  # the program raised it, so the tests are not to blame
    raise _CannotBePassedError(type(value).__name__)


def _exception(kinds: list[str], text: str) -> BaseException:
    """Return an exception like one that the program raised: of the nearest class that Python itself has."""
    error = BaseException(text)
    for kind in kinds:
        found = getattr(builtins, str(kind), None)
        if isinstance(found, type) and issubclass(found, BaseException):
            # Exceptions that end an iteration become RuntimeError, as in generators (PEP 479): a map() of the tests
            # would just stop.
            with suppress(TypeError):  # as of UnicodeDecodeError, which takes five arguments
                error = (RuntimeError if issubclass(found, _ENDS) else found)(text)
                break
    setattr(error, _RAISED, True)
    return error


def main() -> None:
    """Judge the program of standard input, and write the verdict to standard output."""
    order = from_bytes(read_frame(0), int)
    verdict = os.dup(1)
    os.dup2(2, 1)  # standard error goes nowhere; so does what program and tests print
    limit_resources(order["seconds"], order["memory"])
    if order["calls"] is not None:
        drop_rights()
    end_with_parent(order["parent"])
    if order["files"] is not None:
        restrict_files(*order["files"])
    request_end, requests = os.pipe()
    replies, reply_end = os.pipe()
    judge = os.getpid()
    if os.fork() == 0:
        try:
            end_with_parent(judge)
            # The tests are still in the pipe of standard input: close it, and every other descriptor but two.
            os.dup2(2, 0)
            for keep, place in ((request_end, 3), (os.dup(reply_end), 4)):
                os.dup2(keep, place)
            os.closerange(5, 256)
            if order["calls"] is not None:
                restrict_calls(order["calls"])
            serve(order["program"], 3, 4)
        finally:
            os._exit(1)
    os.close(request_end)
    os.close(reply_end)
    if order["calls"] is not None:
        restrict_calls(order["calls"])
    program, nonce = _Program(requests, replies), os.urandom(16)
    if program.value("ended", nonce) != nonce:
        os._exit(1)
    try:
        exec(compile(from_bytes(read_frame(0), int), "<tests>", "exec"), _Names(program))
        os.write(verdict, b"passed")
    except _CannotBePassedError as error:
        os.write(verdict, f"cannot pass {error}".encode())
    finally:
        os._exit(0)
