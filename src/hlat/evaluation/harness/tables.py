"""Tables of a report: the model's columns beside published ones, as Markdown and as an HTML page without scripts."""

import html
from collections.abc import Mapping, Sequence

from hlat.evaluation.harness.report import SuiteReport
from hlat.evaluation.harness.suites import Suite
from hlat.runtime.terminal_text import escape_controls

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 } .wide { overflow-x: auto }
th, td { border-bottom: 1px solid #8886; padding: .3rem .7rem; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left } tr.own { font-weight: 600 }
:root { color-scheme: light dark }
"""

Rows = list[tuple[str, list[str]]]


def markdown_page(suite: Suite, report: SuiteReport) -> str:
    """Write the tables of a report as Markdown."""
    heads, rows = _comparison(suite, report)
    lines = [f"# {_plain(suite.title)}: {_plain(str(report.model['path']))}", ""]
    lines += [_plain(note) + "\n" for note in _notes(suite, report)]
    lines += [*_markdown_table(["model", *heads], rows), ""]
    lines += _markdown_table(["task", *_TASK_HEADS], _task_rows(report))
    return "\n".join(lines) + "\n"


def html_page(suite: Suite, report: SuiteReport) -> str:
    """Write the tables of a report as an HTML page, which loads nothing."""
    heads, rows = _comparison(suite, report)
    title = _escaped(f"{suite.title}: {report.model['path']}")
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>',
        f"<body><main><h1>{title}</h1>",
        *(f"<p>{_escaped(note)}</p>" for note in _notes(suite, report)),
        _html_table("Results in percent", ["model", *heads], rows, 1),
        _html_table("Tasks", ["task", *_TASK_HEADS], _task_rows(report), 0),
        "</main></body></html>\n",
    ]
    return "\n".join(parts)


_TASK_HEADS = ["version", "shots", "samples", "metric", "value"]


def _comparison(suite: Suite, report: SuiteReport) -> tuple[list[str], Rows]:
    """Headings, and a row for the model and each published one."""
    heads = [f"{column.name}{' (lower is better)' if column.lower_is_better else ''}" for column in suite.columns]
    names = [column.name for column in suite.columns]
    own = {**report.columns}
    if suite.average is not None:
        heads.append(suite.average)
        names.append(suite.average)
        own |= {suite.average: report.average} if report.average is not None else {}
    rows = [(str(report.model["path"]), _cells(own, names))]
    published = suite.published.rows if suite.published is not None else {}
    return heads, rows + [(name, _cells(values, names)) for name, values in published.items()]


def _cells(values: Mapping[str, float], names: Sequence[str]) -> list[str]:
    return [f"{values[name]:.1f}" if name in values else "-" for name in names]


def _task_rows(report: SuiteReport) -> Rows:
    return [
        (
            name,
            [
                str(task["version"]),
                str(task["shots"]),
                str(task["samples"]),
                metric,
                "-" if value is None else f"{value:.4f}",
            ],
        )
        for name, task in report.tasks.items()
        for metric, value in task["metrics"].items()
        if "_stderr" not in metric
    ]


def _notes(suite: Suite, report: SuiteReport) -> list[str]:
    """Sentences above the table."""
    model, harness = report.model, report.harness
    notes = [
        f"Model {model['sha256'][:16]}, {model['dtype']}, {model['parameters']:,} parameters; {harness['name']} "
        f"{harness['version']}, seed {harness['seed']}."
    ]
    if report.settings["limit"] is not None:
        notes.append(f"At most {report.settings['limit']} samples of each task: not comparable with complete results.")
    if suite.published is not None:
        notes.append(f"Other rows: {suite.published.source}. {suite.published.note}".strip())
    return notes


def _markdown_table(heads: Sequence[str], rows: Rows) -> list[str]:
    lines = ["| " + " | ".join(map(_plain, heads)) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    return lines + ["| " + " | ".join(map(_plain, [name, *cells])) + " |" for name, cells in rows]


def _plain(text: str) -> str:
    """Escape what Markdown would read as a table, as HTML or as a link."""
    escaped = escape_controls(text).replace("\\", "\\\\")
    for character in "|<>[]`*_":
        escaped = escaped.replace(character, f"\\{character}")
    return escaped.replace("\n", " ")


def _html_table(caption: str, heads: Sequence[str], rows: Rows, own: int) -> str:
    head = "".join(f'<th scope="col">{_escaped(each)}</th>' for each in heads)
    body = "\n".join(
        f'<tr{" class=own" if index < own else ""}><th scope="row">{_escaped(name)}</th>'
        + "".join(f"<td>{_escaped(cell)}</td>" for cell in cells)
        + "</tr>"
        for index, (name, cells) in enumerate(rows)
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{_escaped(caption)}"><table>'
        f"<caption>{_escaped(caption)}</caption><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def _escaped(text: str) -> str:
    return html.escape(escape_controls(text))
