"""Accuracy as lines of text and as an HTML page.

prediction_errors(...) -> lines for a terminal | one page without scripts or external references
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from hlat.page import Html, page, paragraph, section, table
from published_runs.accuracy import COLUMNS

_TITLES = {"by_source": "source", "by_chips": "chips and precision", "by_layout": "layout"}
_WORST = 10
_MANY = 40  # assumptions listed on the page


def accuracy_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Lines of text: step times by source, chips and layout, coverage, memory, assumptions, skipped rows.

    Args:
        result: result of ``prediction_errors``.
    """
    accuracy = result["accuracy"]
    yield f"Step times, {accuracy['convention']}."
    yield "Absolute mean and median, signed median, in percent; thr: absolute mean of the throughput."
    yield "prior only: no fit. fitted: shipped constants. left out, one constant: fitted without the source."
    for key, title in _TITLES.items():
        heads = "".join(f" | {name.replace('_', ' '):^27}" for name in COLUMNS)
        yield ""
        yield f"{title:32} {'n':>5}{heads}"
        yield " " * 38 + " |   mean median signed    thr" * len(COLUMNS)
        for name, columns in (*accuracy[key].items(), ("all", accuracy["all"])):
            if columns["fitted"]["n"]:
                cells = "".join(f" | {_cell(columns[column])}" for column in COLUMNS)
                yield f"{name[:32]:32} {columns['fitted']['n']:5}{cells}"
    yield ""
    yield from _coverage_lines(result["coverage"])
    yield _order_line(result["order"])
    memory = result["memory"]
    if memory["overall"]["n"]:
        yield ""
        yield f"{'memory, by source':60} {'n':>5} {'mean':>7} {'median':>7} {'90%':>7}"
        for name, one in (*memory["groups"].items(), ("all", memory["overall"])):
            yield f"{name[:60]:60} {one['n']:5} {one['mean']:7.1%} {one['median']:7.1%} {one['p90']:7.1%}"
    for reason, count in Counter(row["reason"] for row in memory["not_comparable"]).most_common():
        yield f"memory not compared {count:5}: {reason}"
    yield ""
    for reason, count in _assumptions(result).items():
        yield f"assumed {count:5}: {reason}"
    for reason, count in result["skipped"]["reasons"].items():
        yield f"skipped {count:5}: {reason}"


def _cell(column: Mapping[str, Any]) -> str:
    """Statistics of one column, in percent, 27 characters wide."""
    if not column["n"]:
        return f"{'no other source':^27}"
    names = ("mean", "median", "signed_median", "throughput_mean")
    mean, median, signed, throughput = (100 * column[name] for name in names)
    return f"{mean:6.1f} {median:6.1f} {signed:+6.1f} {throughput:6.1f}"


def _coverage_lines(coverage: Mapping[str, Any]) -> Iterator[str]:
    yield f"{coverage['aimed']:.0%} intervals, made without the source: share of runs and of sources inside, high / low"
    for name, one in (*coverage["by_chips"].items(), ("all", coverage["all"])):
        if one["n"]:
            shares = f"{one['runs_inside']:7.1%} {one['sources_inside']:7.1%} {one['ratio_of_ends']:6.2f}"
            yield f"{name[:32]:32} {one['n']:5} {shares}"


def _order_line(order: Mapping[str, Any]) -> str:
    """One sentence about the order of layouts of one job."""
    if not order["pairs"]:
        return "order of layouts: no job was measured in two"
    near, far = (
        "no pair" if share is None else f"{share:.0%} right" for share in (order["right_below"], order["right_above"])
    )
    return (
        f"order of {order['pairs']:,} pairs of layouts of one job: {far} if predicted {order['ratio'] - 1:.1%} or more "
        f"apart, {near} if less"
    )


def _assumptions(result: Mapping[str, Any]) -> dict[str, int]:
    """Rows by assumption, the most frequent first."""
    counts: dict[str, int] = {}
    for row in result["rows"]:
        for reason in row["assumed"]:
            counts[reason] = counts.get(reason, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def accuracy_page(name: str, result: Mapping[str, Any]) -> Html:
    """One page with the same tables, the worst rows, and every skipped row.

    Args:
        name: name of the file.
        result: result of ``prediction_errors``.
    """
    accuracy = result["accuracy"]
    contents = [
        paragraph(f"Step times, {accuracy['convention']}. Priors and forms were chosen in view of some of these rows."),
        *(section(f"By {title}", [_table(accuracy, key, title)]) for key, title in _TITLES.items()),
        section("Coverage of intervals", [_coverage(result["coverage"]), paragraph(_order_line(result["order"]))]),
        section("Worst rows", [_worst(result["rows"])]),
        section("Assumed", [_pairs(_assumptions(result), "assumption", "Rows by assumption")]),
        section("Skipped", [_skipped(result["skipped"])]),
    ]
    return page(f"Accuracy on {name}", contents)


def _table(accuracy: Mapping[str, Any], key: str, title: str) -> Html:
    names = [title, "n"]
    names += [f"{column.replace('_', ' ')}, {what}" for column in COLUMNS for what in ("mean", "signed median")]
    rows = []
    for name, columns in (*accuracy[key].items(), ("all", accuracy["all"])):
        cells = [_percent(columns[column][what]) for column in COLUMNS for what in ("mean", "signed_median")]
        rows.append((name, str(columns["fitted"]["n"]), *cells))
    return table(names, rows, caption=f"Errors of the step time by {title}")


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}" if value < 0 else f"{value:.1%}"


def _coverage(coverage: Mapping[str, Any]) -> Html:
    rows = [
        (name, str(one["n"]), str(one["sources"]), _percent(one["runs_inside"]), _percent(one["sources_inside"]))
        for name, one in (*coverage["by_chips"].items(), ("all", coverage["all"]))
    ]
    names = ("chips and precision", "n", "sources", "runs inside", "sources inside")
    return table(names, rows, caption=f"Coverage of {coverage['aimed']:.0%} intervals, made without the source")


def _worst(rows: list[dict[str, Any]]) -> Html:
    ranked = sorted(rows, key=lambda row: -abs(row["step_errors"]["left_out"]))[:_WORST]
    cells = [
        (row["id"], row["source"], row["model"], _percent(row["step_errors"]["left_out"]), "; ".join(row["assumed"]))
        for row in ranked
    ]
    return table(("row", "source", "model", "left out", "assumed"), cells, caption=f"The {_WORST} largest errors")


def _pairs(counts: Mapping[str, int], title: str, caption: str) -> Html:
    return table((title, "rows"), [(name, str(count)) for name, count in list(counts.items())[:_MANY]], caption=caption)


def _skipped(skipped: Mapping[str, Any]) -> Html:
    rows = [(row["id"], row["source"], row["reason"]) for row in skipped["rows"]]
    return table(("row", "source", "reason"), rows, caption=f"{skipped['count']} rows that cannot be predicted")
