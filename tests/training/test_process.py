"""The garbage collector runs at the scheduled steps; ``hlat train --profile`` writes a trace, and a table of shares."""

import gc
import json
import weakref

import pytest

from hlat.training.process import OperatorTime, collect_garbage, kind_of, scheduled_gc, table


class Knot:
    """Reference cycle, which only the collector can remove."""

    def __init__(self) -> None:
        self.itself = self


def test_it_collects_at_its_steps_only_and_is_restored_afterwards() -> None:
    with pytest.raises(ZeroDivisionError), scheduled_gc():
        assert not gc.isenabled()
        knot = weakref.ref(Knot())
        for step in range(1, 100):
            collect_garbage(step)
        assert knot() is not None
        collect_garbage(100)
        assert knot() is None
        raise ZeroDivisionError
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_a_profiled_run_writes_a_trace_and_a_table(cli, recipe_file, quick, tmp_path):
    done = cli("train", recipe_file, *quick, "training.steps=8", "schedule.warmup_steps=2", "--profile")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run" / "profile"
    events = json.loads((folder / "rank-0.json").read_text())["traceEvents"]
    assert {f"ProfilerStep#{step}" for step in (3, 4, 5)} <= {event.get("name") for event in events}
    assert "hlat::backward stage 0 micro-batch 0" in {event.get("name") for event in events}
    text = (folder / "rank-0.txt").read_text()
    assert "micro-batch" not in text, "a label is no operator"
    assert text.splitlines()[0].split() == ["kind", "s", "per", "step", "share"]
    shares = [float(line.split()[-1].rstrip("%")) for line in text.split("\n\n")[0].splitlines()[1:]]
    # each is rounded to 0.1 %
    assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares) + 1e-9)
    assert "matrix products" in text and "attention" in text and "optimizer" in text
    assert text in done.stdout


def test_operators_are_grouped_by_kind_with_shares_of_the_time():
    costs = [OperatorTime("aten::mm", 6e6), OperatorTime("aten::addmm", 1e6), OperatorTime("aten::_fused_adamw_", 3e6)]
    lines = table(costs, steps=2).splitlines()
    assert lines[1].split() == ["matrix", "products", "3.5000", "70.0%"]
    assert lines[2].split() == ["optimizer", "1.5000", "30.0%"]
    assert kind_of("aten::silu") == "pointwise and the rest"
    assert kind_of("aten::_scaled_dot_product_flash_attention_for_cpu") == "attention"
