"""results.json: everything that was found, written again after every step; and a table of it for people."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

_LARGEST = 12 << 20  # bytes: files of 16 MiB come back from the device machine
_LOG_TAIL = 150_000  # bytes of one process in log.txt
_SHOWN = 60  # characters of a value in the table


class Results:
    """Results of all steps so far, in a file that is always complete.

    Args:
        folder: folder of results.json, summary.txt and log.txt.
        head: facts about the call, such as its time.
        earlier: results of an earlier call; steps that run again replace theirs.
    """

    def __init__(self, folder: Path, head: dict[str, Any], earlier: dict[str, Any] | None = None) -> None:
        self._folder = folder
        self.content: dict[str, Any] = {"call": head, "steps": {}, "background": {}}
        if earlier:
            self.content["steps"] = dict(earlier.get("steps") or {})
            self.content["earlier_calls"] = [*(earlier.get("earlier_calls") or []), earlier.get("call")]

    @property
    def steps(self) -> dict[str, dict[str, Any]]:
        """Result of each step, by name."""
        steps: dict[str, dict[str, Any]] = self.content["steps"]
        return steps

    def write(self) -> None:
        """Write results.json and summary.txt; if the disk refuses, print that, and go on."""
        try:
            self._write("results.json", json.dumps(finite(self.content), indent=1, allow_nan=False, default=str))
            self._write("summary.txt", table(self.steps))
        except OSError as error:
            print(f"{self._folder}: results cannot be written: {error}", flush=True)

    def _write(self, name: str, text: str) -> None:
        part = self._folder / f".{name}.part"
        part.write_text(text[:_LARGEST], encoding="utf-8")
        part.replace(self._folder / name)

    def log(self, title: str, output: Path) -> None:
        """Append the end of a process's output to log.txt, as long as that stays small enough."""
        try:
            file = self._folder / "log.txt"
            if file.exists() and file.stat().st_size > _LARGEST:
                return
            with output.open("rb") as source, file.open("ab") as log:
                source.seek(max(0, os.fstat(source.fileno()).st_size - _LOG_TAIL))
                log.write(f"\n===== {title}, {time.strftime('%H:%M:%S')}\n".encode() + source.read())
        except OSError as error:
            print(f"{title}: its output cannot be kept: {error}", flush=True)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if there is none, or it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def finite(value: Any) -> Any:
    """Return a value with its infinities and NaN as text, which JSON does not have as numbers."""
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def pairs(result: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return name, prediction and measurement of all numbers that have both, those of a case included."""
    measured = result.get("numbers") or {}
    predicted: dict[str, Any] = {}
    for name, value in (result.get("predicted") or {}).items():
        predicted |= value if isinstance(value, dict) else {name: value}
    return [(name, predicted[name], measured[name]) for name in predicted if name in measured]


def table(steps: dict[str, dict[str, Any]]) -> str:
    """Return a table of all steps: predicted beside measured, checks that failed, and errors."""
    lines = [f"{'step':14} {'':6} {'number':28} {'predicted':>14} {'measured':>14} {'ratio':>7}"]
    for name, result in steps.items():
        state = {True: "ok", False: "FAILED"}.get(result.get("ok"), "-")
        lines.append(f"{name:14} {state:6} {result.get('seconds', 0):.0f} s  {result.get('error') or ''}"[:120])
        for number, before, after in pairs(result):
            lines.append(f"{'':21} {number:28} {_text(before):>14} {_text(after):>14} {_ratio(before, after):>7}")
        failed = [check for check, passed in (result.get("checks") or {}).items() if passed is not True]
        lines += [f"{'':21} not so: {check}" for check in failed]
        lines += [f"{'':21} error in {part}: {_last_line(text)}" for part, text in (result.get("errors") or {}).items()]
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)[:14]
    return f"{value:,.4g}" if abs(value) < 1e5 else f"{value:,.0f}"


def _ratio(before: Any, after: Any) -> str:
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (before, after))
    return f"{after / before:.2f}" if numbers and before else ""


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:_SHOWN]
