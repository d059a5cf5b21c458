"""A run uses only deterministic kernels, unless its recipe allows others."""

import io
import json
from pathlib import Path

import pytest
import torch
import yaml

from hlat.compilation import compile_graphs
from hlat.config.load import parse_recipe
from hlat.runtime.backend.cpu import CpuBackend
from hlat.runtime.distributed.join import Runtime
from hlat.runtime.errors import LaunchError
from hlat.training import loop, run


@pytest.fixture
def recipe(tiny_recipe: str, corpus: Path, prepared: Path, tmp_path: Path):
    def made(deterministic: bool | None, mode: str = "fp32", **sections: dict[str, object]):
        content = yaml.safe_load(tiny_recipe) | {"precision": {"mode": mode}}
        content["run"] |= {"dir": str(tmp_path / "run")}
        if deterministic is not None:
            content["run"]["deterministic"] = deterministic
        content["data"] |= {"path": str(corpus), "prepared_dir": str(prepared)}
        content["schedule"] |= {"kind": "constant", "warmup_steps": 1}
        content["training"]["steps"] = 2
        for section, values in sections.items():
            content[section] = content.get(section, {}) | values
        return parse_recipe(content)

    return made


@pytest.fixture(autouse=True)
def _mode():
    before = torch.get_deterministic_debug_mode()
    yield
    torch.set_deterministic_debug_mode(before)


@pytest.mark.parametrize(
    ("mode", "sections"),
    [
        ("fp32", {"optimizer": {"clip_norm": 0.1}, "memory": {"activation_checkpointing": "full"}}),
        ("mixed", {"data": {"isolate": True}}),
        ("bf16-sr", {"model": {"tie_embeddings": True, "qkv_bias": True, "qk_norm": True}}),
        ("bf16-kahan", {"optimizer": {"betas": [0.9, 0.999]}}),
    ],
)
def test_a_run_uses_no_kernel_that_torch_refuses_in_deterministic_mode(recipe, monkeypatch, mode, sections):
    """Steps, validation and saves of every kind of block in torch's deterministic mode, the default."""
    seen = []
    real = loop.accumulate_gradients

    def watched(*arguments):
        seen.append(torch.get_deterministic_debug_mode())
        return real(*arguments)

    monkeypatch.setattr(loop, "accumulate_gradients", watched)
    assert run(recipe(None, mode, **sections), stream=io.StringIO()).finished
    assert seen == [2, 2]


def test_the_recipe_may_allow_nondeterministic_kernels(recipe, monkeypatch):
    """A step that uses an operator without a deterministic implementation, even on a CPU."""
    real = loop.accumulate_gradients

    def other(*arguments):
        torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))
        return real(*arguments)

    monkeypatch.setattr(loop, "accumulate_gradients", other)
    with pytest.raises(LaunchError, match=r"run\.deterministic=false"):
        run(recipe(True), stream=io.StringIO())
    assert run(recipe(False), stream=io.StringIO()).finished


def test_auto_takes_the_faster_kernel_and_a_resumed_run_keeps_what_it_began_with(recipe, monkeypatch, tmp_path):
    """As on a device whose attention is slower in deterministic mode; the second half runs where it is not."""
    seen, real = [], loop.accumulate_gradients

    def watched(*arguments):
        seen.append(torch.get_deterministic_debug_mode())
        return real(*arguments)

    monkeypatch.setattr(loop, "accumulate_gradients", watched)
    asked = recipe(None, training={"stop_after": 1})
    assert asked.run.deterministic == "auto" and asked.run.determinism is None
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(CpuBackend, "_slowed_attention", frozenset(("flash_attention",)))
        assert run(asked, stream=io.StringIO()).step == 1
    with pytest.raises(LaunchError, match="nothing to compile"):
        compile_graphs(asked, Runtime(torch.device("cpu")))
    assert torch.get_deterministic_debug_mode() == 0, "as the run would"
    assert run(asked, stream=io.StringIO()).finished
    strict = recipe(True, training={"steps": 3})
    assert run(strict, stream=io.StringIO()).finished
    assert seen == [0, 0, 2], "only the last run asks for another value"
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    begun = [event for event in events if event["event"] in ("start", "resume")]
    assert [event["recipe"]["run"]["deterministic"] for event in begun] == [False, False, True]
    assert [change["path"] for event in begun for change in event["changes"]].count("run.deterministic") == 1
