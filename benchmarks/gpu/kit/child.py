"""Program of every process of the kit: calls one function, and writes what it finds as soon as it finds it.

    python kit/child.py --device=cuda --work=FOLDER --result=FILE MODULE FUNCTION [ARGUMENT ...]

The file has what was found until then also if the process is killed later.
"""

import argparse
import faulthandler
import json
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

from kit.report import finite  # noqa: E402


class Context:
    """Settings of a step, and its result.

    Args:
        device: device type.
        tiny: True for models that a CPU computes in seconds.
        work: folder for files that only the kit reads.
        result: file of the result.
        carried: folder with wheels and prepared tokens; None if nothing was carried.
    """

    def __init__(self, device: str, tiny: bool, work: Path, result: Path, carried: Path | None = None) -> None:
        self.device, self.tiny, self.work, self.carried = device, tiny, work, carried
        self._file = result
        self.numbers: dict[str, Any] = {}
        self.checks: dict[str, Any] = {}
        self.skipped: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self._parts: dict[str, float] = {}

    @property
    def ok(self) -> bool:
        """True if all parts have run and all checks hold."""
        return not self.errors and all(value is True for value in self.checks.values())

    def write(self, ended: bool = False) -> None:
        """Write the result so far; it counts as right only at the end."""
        content = {"ok": ended and self.ok, "numbers": self.numbers, "checks": self.checks, "skipped": self.skipped}
        content |= {"errors": self.errors, "seconds of parts": self._parts}
        part = self._file.with_name(f"{self._file.name}.part")
        part.write_text(json.dumps(finite(content), default=str, allow_nan=False), encoding="utf-8")
        part.replace(self._file)

    def found(self, numbers: Mapping[str, Any]) -> None:
        """Add numbers to the result."""
        self.numbers |= numbers
        self.write()

    def check(self, name: str, holds: bool, detail: object = None) -> None:
        """Add a check; ``detail`` is kept if it does not hold."""
        self.checks[name] = True if holds else str(detail if detail is not None else "no")
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {name} {'' if detail is None else detail}", flush=True)
        self.write()

    def skip(self, name: str, reason: str) -> None:
        """Say that a part cannot run here."""
        self.skipped[name] = reason
        self.write()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run a part of the step: its error is a result, and the next part goes on."""
        began = time.monotonic()
        print(f"--- {name}", flush=True)
        try:
            yield
        except Exception:
            self.errors[name] = traceback.format_exc()[-3000:]
            traceback.print_exc()
            free_memory()
        self._parts[name] = round(time.monotonic() - began, 2)
        self.write()


def free_memory() -> None:
    """Give freed memory of the device back: after an error, other parts need it."""
    import gc

    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator().type)
        getattr(module, "empty_cache", lambda: None)()


def main() -> None:
    """Run one step."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    parser = argparse.ArgumentParser()
    for name in ("device", "work", "result", "carried"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("module")
    parser.add_argument("function")
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    carried = Path(options.carried) if options.carried else None
    context = Context(options.device, options.tiny, Path(options.work), Path(options.result), carried)
    context.write()
    with context.part("step"):
        getattr(import_module(options.module), options.function)(context, *options.arguments)
    context.write(ended=True)


if __name__ == "__main__":
    main()
