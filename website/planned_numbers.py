"""Numbers of plans that pages of docs quote, written again after the planner has changed.

docs/planning.md, docs/buying.md, docs/parallelism.md  ```console blocks of `hlat plan` --> what it prints now, on 80
    columns; a block that ends with "..." keeps its number of paragraphs
docs/clusters/*.md, docs/parallelism.md  tables under "| `hlat plan ...` | prediction |" --> rows of the chosen layout

python -m website.planned_numbers     rewrites the pages, not their prose, and names the commands whose numbers changed
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hlat.planner.expected import two_digits
from hlat.runtime.quantities import usd_text

ROOT = Path(__file__).resolve().parents[1]
PRINTED = re.compile(r"^```console\n\$ (hlat plan (?:[^\n]*\\\n)*[^\n]*)\n(.*?)\n```$", re.DOTALL | re.MULTILINE)
"""A command with what it prints."""
TABLE = re.compile(r"^\| `(hlat plan [^`]+)` \| prediction \|\n\|---\|---\|\n((?:\|.*\n)+)", re.MULTILINE)
_FILE = re.compile(r"^```yaml\n# (\S+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def prediction_rows(plan: Mapping[str, Any]) -> list[str]:
    """Return the rows of a page's table for a plan, as ``hlat plan --json`` prints it."""
    one = plan["chosen"]
    parts = ("tensor", "pipeline", "data", "zero", "replicas", "micro_batch")
    layout = ", ".join(f"{name} {one[name]}" for name in parts)
    cost = "not known" if one["cost_usd"] is None else _ranged(one, "cost_usd", lambda usd: usd_text(usd, 2))
    memory = plan["assumptions"]["memory_gib_per_device"]
    every = plan["assumptions"]["checkpoint_every_steps"]
    days = _ranged(one, "days", two_digits)
    rows = {
        "layout": f"{layout}, recomputation {one['activation_checkpointing']}",
        "memory of the fullest device": f"{one['memory_gib']:.1f} GiB of {memory}",
        "step": f"{one['step_seconds']:.2f} s",
        "speed": f"{one['tokens_per_second_per_chip']:,.0f} tokens/s per chip, MFU {one['mfu']:.1%}",
        "whole run": f"{days} days, goodput {one['goodput']:.1%}, a checkpoint every {every:,} steps",
        "price": cost,
    }
    return [f"| {name} | {value} |" for name, value in rows.items()]


def _ranged(plan: Mapping[str, Any], name: str, write: Callable[[float], str]) -> str:
    low, high = plan[f"{name}_interval"]
    return f"{write(plan[name])} ({write(low)} to {write(high)})"


def shown(printed: str, block: str) -> str:
    """Return what a block shows of an output: all, or as many paragraphs as stand before its last one, "..."."""
    *kept, last = block.split("\n\n")
    return "\n\n".join([*printed.split("\n\n")[: len(kept)], last]) if last == "..." else printed


def _with_output(match: re.Match[str]) -> str:
    printed = _run(match[1].replace("\\\n", " "), ROOT).rstrip()
    return _changed(match, shown(printed, match[2]))


def _with_rows(match: re.Match[str], folder: Path) -> str:
    rows = prediction_rows(json.loads(_run(f"{match[1]} --json", folder)))
    return _changed(match, "".join(f"{row}\n" for row in rows))


def _changed(match: re.Match[str], text: str) -> str:
    if match[2] != text:
        sys.stderr.write(f"changed: {' '.join(match[1].split())}\n")
    return match[0].replace(match[2], text)


def _run(command: str, folder: Path) -> str:
    words = [sys.executable, "-m", *shlex.split(command)]
    env = {**os.environ, "COLUMNS": "80"}
    return subprocess.run(words, cwd=folder, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


def _refresh_cluster_page(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "recipes").symlink_to(ROOT / "recipes")
        for file, content in _FILE.findall(text):
            (folder / file).write_text(content, encoding="utf-8")
        return TABLE.sub(lambda match: _with_rows(match, folder), text)


if __name__ == "__main__":
    layouts = ROOT / "docs/parallelism.md"
    for each in (ROOT / "docs/planning.md", ROOT / "docs/buying.md", layouts):
        each.write_text(PRINTED.sub(_with_output, each.read_text(encoding="utf-8")), encoding="utf-8")
    for each in (layouts, *sorted((ROOT / "docs/clusters").glob("*.md"))):
        each.write_text(_refresh_cluster_page(each), encoding="utf-8")
