"""Pages of what a run records: metrics of its steps, and events.

docstring of hlat.tracking.records, families of the metrics server --metrics_page--> Markdown
calls in src/hlat that record an event: name, fields, module       --events_page-->  Markdown
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hlat.tracking.records
from hlat.launch.metrics_server import ObservedRun, RunObservation, metric_families
from hlat.tracking.console import _LEVELS

SOURCE = Path(hlat.tracking.records.__file__).parents[1]
RECORDERS = {"event", "_report", "TrackerNote", "TierEvent", "_add_event"}
"""Functions and classes whose first argument is the name of an event."""
OTHER_FILES = {"open", "sample"}  # notes between processes; records of samples.jsonl


@cache
def events() -> dict[str, tuple[set[str], set[str]]]:
    """Return fields and modules of every event that the source names, by event."""
    found: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and node.args and _records(ast.unparse(node.func))):
                continue
            for kind in _alternatives(node.args[0]):
                if isinstance(kind, str) and kind not in OTHER_FILES:
                    fields, modules = found[kind]
                    fields.update(word.arg for word in node.keywords if word.arg)
                    modules.add(str(file.relative_to(SOURCE)))
    return dict(found)


def _alternatives(name: ast.expr) -> Iterator[object]:
    """Yield the values of an expression that chooses between constants."""
    if isinstance(name, ast.IfExp):
        yield from _alternatives(name.body)
        yield from _alternatives(name.orelse)
    else:
        yield getattr(name, "value", None)


def _records(function: str) -> bool:
    return function.rpartition(".")[2] in RECORDERS or function.endswith("events.append")


def events_page() -> str:
    """Return the page of events."""
    lines = [
        "# Events",
        "",
        "Every event of `events.jsonl`, generated from the calls that record them. A line has `time` (UTC), `event`",
        "and the fields below, as far as they are known. The level is that of the line of `tracking.console: json`",
        "([operating runs](../operators.md)); the [runbook](../runbook.md) has cause and cure.",
        "",
        "| event | level | fields | recorded in |",
        "|---|---|---|---|",
    ]
    for kind, (fields, modules) in sorted(events().items()):
        named, places = (", ".join(f"`{one}`" for one in sorted(of)) for of in (fields, modules))
        lines.append(f"| `{kind}` | {_LEVELS.get(kind, 'info')} | {named} | {places} |")
    return "\n".join([*lines, ""])


def metrics_table() -> str:
    """Return the table of metrics.jsonl: the docstring of ``hlat.tracking.records.Metrics``."""
    tree = ast.parse(Path(hlat.tracking.records.__file__).read_text(encoding="utf-8"))
    texts = [
        node.value.value for node in tree.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    (text,) = (one for one in texts if isinstance(one, str) and "| key |" in one)
    return text.replace("``", "`")


def metrics_page() -> str:
    """Return the page of metrics."""
    status = RunObservation(1, [], {}, None, False, {}, {}, None, {"productive": 0.0})
    run = ObservedRun("x", Path(), Path(), 1, None, 1, 0.0)
    lines = [
        "# Metrics",
        "",
        "## metrics.jsonl",
        "",
        metrics_table().strip(),
        "",
        "Read it with `hlat.metrics(RUN).to_pandas()`, or `pandas.read_json(FILE, lines=True)`.",
        "",
        "## Prometheus",
        "",
        "Served on `/metrics` if `tracking.prometheus` is set ([operating runs](../operators.md)).",
        "",
        "| metric | type | meaning |",
        "|---|---|---|",
    ]
    lines += [f"| `{one.name}` | {one.kind} | {one.help} |" for one in metric_families(run, status)]
    return "\n".join([*lines, ""])
