"""Precision of a plan: by default the mode that a run would use on that chip."""

from dataclasses import replace

import pytest
import yaml

from hlat.hardware import load_catalog, parse_cluster
from hlat.planner.problem.question import PlanQuestion
from hlat.planner.problem.request import resolve_request


@pytest.fixture
def recipe(tmp_path):
    content = {"model": {"preset": "llama-2-7b"}, "data": {"path": "x"}, "training": {"steps": 7}}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("mode", [None, "auto"])
@pytest.mark.parametrize("known", ["bfloat16 and float32", "float32 alone", "bfloat16 emulated"])
def test_auto_is_mixed_on_chips_that_are_faster_in_bf16_and_fp32_on_others(recipe, mode, known):
    cluster = parse_cluster("h100:8", load_catalog())
    figures = dict(cluster.chip.tflops)
    if known == "float32 alone":
        figures = {"float32": figures["float32"]}
    if known == "bfloat16 emulated":  # as measured on a CPU without bf16 instructions
        slow = figures["bfloat16"].model_copy(update={"dense": figures["float32"].dense / 100})
        figures = {"float32": figures["float32"], "bfloat16": slow}
    cluster = replace(cluster, chip=cluster.chip.model_copy(update={"tflops": figures}))
    expected = "mixed" if known == "bfloat16 and float32" else "fp32"
    for model in (recipe, "llama-2-7b"):
        request = resolve_request(PlanQuestion(model, precision=mode), cluster)
        assert request.mode == expected
        assert any(
            f"precision {expected}, which is what precision.mode=auto is on" in sentence for sentence in request.assumed
        )
    assert resolve_request(PlanQuestion(recipe, precision="bf16-sr"), cluster).mode == "bf16-sr"
