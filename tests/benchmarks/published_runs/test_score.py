"""Scores of published runs: columns, regret against a plain computation, verdicts on memory."""

import csv
import json
import sys

import pytest

from published_runs import score as module
from published_runs.score import score

JOB = {
    "model": "m", "family": "dense", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 11008,
    "gated_mlp": 1, "vocab": 32000, "seq_len": 4096, "global_batch": 64, "micro_batch": 1, "chip": "A100-SXM-80GB",
    "n_chips": 16, "tp": 1, "sp": 1, "pp": 1, "zero_stage": 1, "vpp": 1, "activation_ckpt": "none",
    "precision": "bf16", "interconnect": "8x HDR per node", "framework": "Megatron-LM FlashAttention-2",
    "step_time_s": "", "outcome": "",
}  # fmt: skip
RUNS = [  # id, source, what differs
    ("a1", "full memory", {"tp": 2, "step_time_s": 9.0}),
    ("a2", "full memory", {"tp": 4, "step_time_s": 6.0}),
    ("a3", "full memory", {"tp": 4, "pp": 2, "step_time_s": 7.0}),
    ("a4", "full memory", {"tp": 8, "activation_ckpt": "full", "step_time_s": 20.0}),
    ("a5", "full memory", {"zero_stage": 0, "outcome": "OOM"}),  # 16 bytes for each of 6.7e9 weights: 108e9
    ("b1", "full memory", {"global_batch": 128, "tp": 2, "step_time_s": 9.0}),
    ("b2", "full memory", {"global_batch": 128, "tp": 4, "step_time_s": 9.0}),
    ("c1", "tie", {"pp": 2, "vpp": 4, "step_time_s": 3.0}),
    ("c2", "tie", {"zero_stage": 3, "step_time_s": 2.0}),
    ("c3", "tie", {"tp": 8, "step_time_s": 1.0}),
    ("d1", "tie", {"chip": "Z900", "step_time_s": 1.0}),
    ("d2", "tie", {"global_batch": 256}),
    ("e1", "wrong about memory", {"zero_stage": 3, "micro_batch": 2, "outcome": "CUDA out of memory"}),
    ("e2", "wrong about memory", {"tp": 2, "step_time_s": 4.0}),
    ("e3", "wrong about memory", {"tp": 4, "step_time_s": 2.0}),
    ("e4", "wrong about memory", {"tp": 2, "pp": 2, "step_time_s": 5.0}),
]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    file = tmp_path_factory.mktemp("score") / "runs.csv"
    with file.open("w", encoding="utf-8", newline="") as target:
        writer = csv.DictWriter(target, ["id", "source", "dp", *JOB])
        writer.writeheader()
        for name, source, changes in RUNS:
            row = JOB | changes
            writer.writerow({"id": name, "source": source, "dp": 16 // (row["tp"] * row["pp"])} | row)
    return file


@pytest.fixture(scope="module")
def content(table):
    return score(table, sweeps=True)


def test_rows_and_what_is_skipped(content, table, monkeypatch, capsys):
    measured = {name: changes["step_time_s"] for name, _, changes in RUNS if "step_time_s" in changes}
    del measured["d1"]
    assert {row["id"]: row["measured"] for row in content["rows"]} == pytest.approx(measured)
    assert all(row.keys() == {"id", "source", "measured", "predicted", "low", "high"} for row in content["rows"])
    assert all(0 < row["low"] < row["predicted"] < row["high"] for row in content["rows"])
    reasons = {row["id"]: row["reason"] for row in content["skipped"]}
    assert reasons.keys() == {"d1", "d2"}, "a run out of memory has no step, and is not skipped"
    assert "chip not in the catalog" in reasons["d1"] and reasons["d2"] == "no throughput published"
    out = table.with_suffix(".json")
    monkeypatch.setattr(sys, "argv", ["score.py", str(table), "--sweeps", "--json", str(out)])
    module.main()
    assert json.loads(out.read_text(encoding="utf-8")) == json.loads(json.dumps(content))
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("full memory", "sweeps: regret", "mean of sources", "fits: "))


def test_without_sweeps_the_rows_are_the_same(content, table):
    assert score(table, sweeps=False) == {name: content[name] for name in ("unit", "rows", "skipped")}


def test_regret_is_that_of_a_plain_computation(content):
    """Each choice follows from the predicted steps by a rule that fits in a line; measured steps give its regret."""
    predicted = {row["id"]: row["predicted"] for row in content["rows"]}
    sweeps = {sweep["source"]: sweep for sweep in content["sweeps"]}
    assert len(content["sweeps"]) == len(sweeps) == 3, "two layouts are no sweep"
    # The layout without sharding is out of memory, as predicted, so the fastest of the others is taken.
    assert sweeps["full memory"]["chosen"] == min(("a1", "a2", "a3", "a4"), key=predicted.get) == "a1"
    # A pipeline is less than 2 % faster than what needs none.
    assert predicted["c1"] < predicted["c2"] < 1.02 * predicted["c1"] < predicted["c3"]
    assert (sweeps["tie"]["chosen"], sweeps["tie"]["fastest_predicted"]) == ("c2", "c1")
    assert sweeps["wrong about memory"]["chosen"] == "e1" and sweeps["wrong about memory"]["regret"] is None
    assert (sweeps["full memory"]["best"], sweeps["tie"]["best"]) == ("a2", "c3")
    assert sweeps["full memory"]["regret"] == pytest.approx(9 / 6 - 1)
    assert sweeps["tie"]["regret"] == pytest.approx(2 / 1 - 1)
    assert sweeps["tie"]["regret_of_fastest"] == pytest.approx(3 / 1 - 1)
    assert sweeps["wrong about memory"]["regret_of_fastest"] == pytest.approx(4 / 2 - 1)
    assert sweeps["full memory"]["mean_of_layouts"] == pytest.approx((9 + 6 + 7 + 20) / 4 / 6 - 1)
    assert {(one["n"], one["out_of_memory"], one["chips"]) for one in content["sweeps"]} == {
        (5, 1, 16),
        (3, 0, 16),
        (4, 1, 16),
    }


def test_verdicts_are_of_sources_that_report_runs_out_of_memory(content):
    """All that ran is said to fit; of two runs out of memory one is found out. The tie's source says nothing."""
    said = {"ran": 9, "ran_said_to_fit": 1.0, "out_of_memory": 2, "out_of_memory_said_not_to": 0.5}
    assert content["fits"] == said
