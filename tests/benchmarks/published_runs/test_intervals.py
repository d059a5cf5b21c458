"""Left-out fits and intervals: a planted truth is found, and coverage is counted on sources that took no part."""

import csv
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from hlat.planner.cost.calibration import shipped_interval, undecided_ratio
from hlat.planner.problem.workload import WorkloadColumns
from published_runs import LeftOutErrors, accuracy_lines, accuracy_page, prediction_errors
from published_runs.constants_fit import fit_constants, prior_constants
from published_runs.program import run_steps
from published_runs.runs import read_published_runs

ROOT = Path(__file__).parents[3]
COLUMNS = (
    "id,source,model,family,layers,hidden,heads,kv_heads,ffn,gated_mlp,vocab,seq_len,global_batch,micro_batch,chip,"
    "n_chips,tp,sp,pp,dp,zero_stage,vpp,activation_ckpt,precision,interconnect,framework,tok_s_chip_norm"
)


def write(path: Path, sources: int = 4) -> Path:
    """A table of runs of several sources, whose measured throughputs are placeholders."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        file.write(COLUMNS + "\n")
        for number in range(6 * sources):
            hidden, nodes, tensor = (2048, 4096, 8192)[number % 3], 2 ** (number % 4), (1, 8)[number % 2]
            chips = 8 * nodes
            table.writerow(
                [number, f"s{number % sources}", "m", "dense", 32, hidden, hidden // 128, hidden // 128, 4 * hidden, 0,
                 32000, 4096, 8 * chips, 2, "H100-SXM-80GB", chips, tensor, 1, 1, chips // tensor, 1, 1, "full", "bf16",
                 "8x NDR per node", "Megatron-LM FlashAttention-2", 1000 + number]
            )  # fmt: skip
    return path


def test_a_fit_finds_planted_constants_and_keeps_near_the_known_ones_with_few_sources(tmp_path: Path) -> None:
    """Eight sources whose products are a tenth slower against the known value, which weighs as two: they win."""
    runs, _ = read_published_runs(write(tmp_path / "runs.csv", sources=8))
    columns = WorkloadColumns([run.workload for run in runs])
    priors, key = prior_constants(), ("products", "hopper")
    slower = priors.with_values({key: priors.values[key] * 0.9})
    groups = np.array([run.group for run in runs])
    truth = run_steps(columns, slower).step
    assert fit_constants(columns, truth, groups).values[key] == pytest.approx(slower.values[key], rel=0.01)
    one = np.flatnonzero(groups == "s0")
    alone = fit_constants(columns.take(one), truth[one], groups[one])
    assert alone.values == priors.values, "one source is outweighed"


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Errors of the table of four sources."""
    return prediction_errors(write(tmp_path_factory.mktemp("errors") / "runs.csv"))


def test_no_measurement_of_a_source_enters_its_own_columns(errors: dict[str, Any], tmp_path: Path) -> None:
    """Measured values of s0 doubled: its left-out and baseline predictions and its intervals stay the same."""
    file = write(tmp_path / "runs.csv")
    lines = file.read_text(encoding="utf-8").splitlines()
    doubled = [
        line.rsplit(",", 1)[0] + f",{2 * int(line.rsplit(',', 1)[1])}" if ",s0," in line else line for line in lines
    ]
    file.write_text("\n".join(doubled) + "\n", encoding="utf-8")
    after = prediction_errors(file)
    for old, new in zip(errors["rows"], after["rows"], strict=True):
        if old["source"] == "s0":
            for column in ("prior_only", "fitted", "left_out", "one_constant"):
                steps = [(1 + row["step_errors"][column]) * row["measured_step_seconds"] for row in (old, new)]
                assert steps[0] == pytest.approx(steps[1], rel=1e-9), column


def test_columns_have_one_convention(errors: dict[str, Any]) -> None:
    """The throughput error t of a step-time error e: t = 1 / (1 + e) - 1."""
    for row in errors["rows"]:
        assert row["error"] == pytest.approx(1 / (1 + row["step_errors"]["fitted"]) - 1)
    fitted = errors["accuracy"]["all"]["fitted"]
    assert fitted["signed_mean"] == pytest.approx(np.mean([row["step_errors"]["fitted"] for row in errors["rows"]]))
    assert fitted["throughput_mean"] == pytest.approx(errors["overall"]["mean"])
    json.dumps(errors, allow_nan=False)
    text = "\n".join(accuracy_lines(errors))
    assert all(word in text for word in ("prior only", "left out", "one constant", "s3", "80% intervals"))
    page = accuracy_page("<b id=foreign>", errors)
    assert "<b id=foreign" not in page and "&lt;b id=foreign&gt;" in page


def test_intervals_cover_sources_that_took_no_part() -> None:
    """Twenty sources whose biases are skewed, each left out in turn: 0.75 to 0.8 of 2,000 sources are inside.

    With K = 19 others, at least 0.8 x 20 / 19 of them are inside: 16, or 17 if both ends move past one. Both ends lie
    on a source, so a new one falls between them with probability 15 / 20 or 16 / 20. Leaving each of 20 out in turn
    makes 100 independent groups, whose standard error is below 0.01; three such are allowed.
    """
    random = np.random.default_rng(1)
    inside = []
    for _ in range(100):
        biases = 0.2 * random.exponential(1, 20) - 0.1
        sources = [f"s{number}" for number in range(20)]
        errors = LeftOutErrors(np.exp(biases), ["hopper"] * 20, sources)
        for source, bias in zip(sources, biases, strict=True):
            one = errors.interval("hopper", without=source)
            inside.append(np.log(one.low) <= bias <= np.log(one.high))
    assert 0.75 - 0.03 < np.mean(inside) < 0.8 + 0.03


def test_an_interval_is_as_skewed_as_the_errors() -> None:
    """Many sources, exponential: quantiles 0.1 and 0.9 are -0.1 + 0.2 x (0.105, 2.303) by the inverse distribution.

    The correction for 400 sources is below 0.3 %, the standard error of the upper quantile 0.2 x 3 / 20 = 0.03, of the
    lower 0.2 x 0.33 / 20 = 0.003; three such are allowed.
    """
    biases = 0.2 * np.random.default_rng(2).exponential(1, 400) - 0.1
    one = LeftOutErrors(np.exp(biases), ["hopper"] * 400, [f"s{number}" for number in range(400)]).interval("hopper")
    assert np.log(one.low) == pytest.approx(-0.079, abs=0.01) and np.log(one.high) == pytest.approx(0.361, abs=0.09)


def test_errors_of_borrowed_constants_widen_no_other_family() -> None:
    logs = np.array([-0.1, 0.1, 1.5, 1.6])
    errors = LeftOutErrors(np.exp(logs), ["ampere", "hopper", "xe", "xe"], ["a", "b", "c", "d"])
    assert errors.interval("ampere").high == pytest.approx(np.exp(0.1))
    assert errors.interval("xe").high == pytest.approx(np.exp(1.6))


def test_families_of_few_sources_take_the_pooled_errors() -> None:
    ratios, families = (
        np.exp([0.01, 0.02, -0.3, 0.3, -0.2, 0.2]),
        ["tpu", "tpu", "hopper", "hopper", "ampere", "ampere"],
    )
    errors = LeftOutErrors(ratios, families, ["a", "a", "b", "c", "d", "e"])
    few, none = errors.interval("tpu"), errors.interval("blackwell")
    assert few.low == pytest.approx(np.exp(-0.3)) and few.high == pytest.approx(np.exp(0.3)) and few.sources == 1
    assert (none.low, none.high, none.sources) == (pytest.approx(np.exp(-0.3)), pytest.approx(np.exp(0.3)), 0)
    assert LeftOutErrors(np.array([]), [], []).interval("tpu").high == 2


def test_uncertain_readings_widen_both_sides() -> None:
    errors = LeftOutErrors(np.exp([-0.1, 0.1]), ["tpu", "tpu"], ["a", "b"])
    one = errors.interval("tpu")
    wide = one.widened(0.1)
    assert wide.low < one.low < one.high < wide.high
    assert np.log(wide.high) == pytest.approx(np.hypot(0.1, 0.12816), rel=1e-3)
    assert one.widened(0).low == pytest.approx(one.low)


def test_shipped_intervals_are_those_of_the_published_runs(shared: Path, tmp_path: Path) -> None:
    """The table in the package equals what the command computes, to the rounding of fits on another CPU."""
    known, every = shared / "data" / "published_runs.csv", tmp_path / "all.csv"
    if not known.is_file():
        pytest.skip("the table of measured runs is not here")
    rows = []
    published = ROOT / "benchmarks" / "published"
    tables = (f"{name}.csv" for name in ("new_runs", "new_runs_2", "new_runs_3", "new_runs_4", "sweeps"))
    for file in (known, *(published / table for table in tables)):
        with file.open(encoding="utf-8", newline="") as source:
            rows += list(csv.DictReader(source))
    with every.open("w", encoding="utf-8", newline="") as target:
        table = csv.DictWriter(target, list(dict.fromkeys(name for row in rows for name in row)), restval="")
        table.writeheader()
        table.writerows(rows)
    result = prediction_errors(every)
    for name, one in result["intervals"].items():
        ours = shipped_interval(name.removesuffix(" fp8"), eight_bit=name.endswith("fp8"))
        shipped, found = (ours.low, ours.median, ours.high), (one["low"], one["median"], one["high"])
        assert shipped == pytest.approx(found, abs=0.005), name
        assert ours.sources == one["sources"]
    shipped = yaml.safe_load(files("hlat.planner.cost").joinpath("intervals.yaml").read_text(encoding="utf-8"))
    assert shipped["intervals"].keys() == result["intervals"].keys()
    assert shipped["chips"] == result["chips"]
    assert shipped["order"]["sources"] == result["order"]["sources"]
    assert undecided_ratio() == pytest.approx(result["order"]["ratio"], abs=0.005)
    coverage = result["coverage"]["all"]
    assert 0.75 < coverage["sources_inside"] < 0.87


def test_intervals_contain_four_of_five_runs_of_new_sources() -> None:
    """Sources whose errors are alike: of as many sources again, which no interval has seen, 0.8 are inside.

    1,000 new runs of 40 sources of one family: the standard deviation of the coverage is 0.013, and the quantiles of 40
    sources of 10 runs each have one of about 0.03. Three of both together are 0.1.
    """
    numbers = np.random.default_rng(3)
    sources = np.repeat(np.arange(40), 10)
    logs = 0.1 * numbers.standard_normal(400) + 0.05 * numbers.standard_normal(40)[sources]
    interval = LeftOutErrors(np.exp(logs), ["hopper"] * 400, [str(one) for one in sources]).interval("hopper")
    new = np.exp(0.1 * numbers.standard_normal(1000) + 0.05 * np.repeat(numbers.standard_normal(40), 25))
    assert ((new >= interval.low) & (new <= interval.high)).mean() == pytest.approx(0.8, abs=0.1)


def test_the_correction_is_nearest_to_the_wanted_coverage_and_does_not_see_the_source_left_out() -> None:
    numbers = np.random.default_rng(4)
    sources = np.repeat(np.arange(15), 8)
    logs = 0.2 * numbers.standard_t(3, 120)
    names = [f"s{one}" for one in sources]
    errors = LeftOutErrors(np.exp(logs), ["ampere"] * 120, names)
    covered = np.mean([errors._covered(f"s{one}", None) for one in range(15)], axis=0)
    assert abs(covered[errors.correction()] - 0.8) == pytest.approx(np.abs(covered - 0.8).min())
    moved = np.where(sources == 0, logs + 3, logs)
    others = LeftOutErrors(np.exp(moved), ["ampere"] * 120, names)
    assert others.interval("ampere", without="s0") == errors.interval("ampere", without="s0")
    few = LeftOutErrors(np.exp(logs[:40]), ["ampere"] * 40, names[:40])
    assert few.correction() == len(covered) - 1, "five sources: the finite-sample correction as it is"
