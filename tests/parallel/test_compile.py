"""Compiled blocks compute the same model and are compiled once; run.compile=auto decides by device and run length."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hlat.config import Recipe, RecipeError
from hlat.config.load import parse_recipe
from hlat.model import IGNORED
from hlat.parallel import ParallelModel, build_parallel, decide_compilation
from hlat.parallel.device_support import check_isolation, missing_compiler
from hlat.runtime.backend.cpu import LONG_RUN, CpuBackend
from hlat.runtime.distributed.join import Runtime
from hlat.runtime.errors import LaunchError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MODEL = {"vocab_size": 64, "layers": 3, "hidden_size": 32, "intermediate_size": 96, "heads": 4, "kv_heads": 2}


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of compute capability 9.0 for questions about the device cuda, which this machine may lack."""
    monkeypatch.setattr("hlat.runtime.backend.cuda.compute_capability", lambda device: (9, 0))


def recipe(compile_: str, world: int = 1, **sections: object) -> Recipe:
    content = {
        "run": {"compile": compile_},
        "model": MODEL,
        "data": {"path": "none", "sequence_length": 16, "tokenizer": {"train": "char"}},
        "batch": {"global_batch": 8, "micro_batch": 4},
        "training": {"steps": 9},
        "precision": {"mode": "fp32"},
    }
    return parse_recipe(content | sections, world=world)


def gradients(model: ParallelModel, steps: int) -> list[torch.Tensor]:
    """Accumulate gradients over a different batch per step."""
    for step in range(steps):
        tokens = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(step))
        labels = tokens[:, 1:].clone()
        labels[0, :5] = IGNORED
        model.accumulate_gradients(tokens[:, :-1], labels)
    return [each.gradient for each in model.local_parameters if each.gradient is not None]


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("checkpointing", "model"),
    [
        ("full", {}),
        pytest.param("none", {}, marks=pytest.mark.slow),
        pytest.param("full", {"architecture": "olmo2"}, marks=pytest.mark.slow),
        pytest.param("selective", {"architecture": "mistral", "sliding_window": 5}, marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_compute_the_same_gradients_with_one_graph(checkpointing: str, model: dict[str, Any]) -> None:
    """Gradients differ by the order of summation and the compiler's fused multiply-adds.

    That is a few roundings of 2^-24 for each of about 40 operations on the path of a block, forward and backward, with
    sums of up to 96 terms.
    """
    if shutil.which("g++") is None:  # then the error is expected
        with pytest.raises(LaunchError):
            build_parallel(recipe("blocks"), Runtime(CPU), seed=1)
        return
    torch._dynamo.reset()
    more = {"memory": {"activation_checkpointing": checkpointing}, "model": MODEL | model}
    eager = gradients(build_parallel(recipe("none", **more), Runtime(CPU), seed=1), 2)
    parallel = build_parallel(recipe("blocks", **more), Runtime(CPU), seed=1)
    before = graphs()
    compiled = gradients(parallel, 2)
    for ours, theirs in zip(compiled, eager, strict=True):
        assert (ours - theirs).norm() <= 2 * 3 * 40 * 2.0**-24 * theirs.norm()
    after = graphs()
    assert after == before + 1, "three blocks, one graph"
    gradients(parallel, 4)
    assert graphs() == after, "nothing is recompiled"


def test_auto_gives_the_reason_not_to_compile() -> None:
    assert not decide_compilation(recipe("auto"), CPU).on
    assert "without bf16 instructions" in str(decide_compilation(recipe("auto"), CPU))
    assert decide_compilation(recipe("auto", 2, parallel={"tensor": 2}), CUDA).on
    deep = {"vocab_size": 64, "layers": 4, "hidden_size": 32, "intermediate_size": 96, "heads": 4}
    batch = {"global_batch": 8, "micro_batch": 1}
    zbv = recipe("auto", 2, parallel={"pipeline": 2, "schedule": "zbv"}, batch=batch, model=deep)
    assert "zbv" in str(decide_compilation(zbv, CUDA))
    assert str(decide_compilation(recipe("none"), CUDA)) == "not compiled: run.compile=none"


def test_auto_compiles_long_runs_on_a_cpu_with_fast_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of a run is its FLOPs per thread of all processes.

    There are six per token and weight of a matrix product (Kaplan et al. 2020, section 2.1), plus those of attention:
    in this model at most a twentieth more.
    """
    monkeypatch.setattr(CpuBackend, "has_fast_bf16", lambda self, device: True)
    model = {"vocab_size": 4096, "layers": 4, "hidden_size": 512, "intermediate_size": 2048, "heads": 4}
    per_step = 6 * (4 * (4 * 512**2 + 3 * 512 * 2048) + 4096 * 512) * 8 * 16
    needed = LONG_RUN * 2 * torch.get_num_threads() / per_step  # for two processes
    for precision, factor, compiled in (("mixed", 1.05, True), ("mixed", 0.9, False), ("fp32", 2.0, False)):
        steps = {"training": {"steps": int(needed * factor)}, "precision": {"mode": precision}}
        long_run = recipe("auto", 2, model=model, **steps)
        assert decide_compilation(long_run, CPU, world=2).on == compiled, (precision, factor)
        assert decide_compilation(long_run, CPU, world=4).on == (compiled and factor > 2)
    monkeypatch.setattr(CpuBackend, "has_fast_bf16", lambda self, device: False)
    slow = recipe("auto", model=model, training={"steps": int(needed * 3)}, precision={"mode": "mixed"})
    assert not decide_compilation(slow, CPU).on


def test_without_a_compiler_blocks_is_an_error_and_auto_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(LaunchError, match=r"C\+\+ compiler.*g\+\+"):
        decide_compilation(recipe("blocks"), CPU)
    assert "compiler" in str(decide_compilation(recipe("auto"), CUDA))


def test_a_device_needs_its_own_kind_of_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CPU needs a C++ compiler, a GPU a C compiler; or the one named by the environment variable."""
    only = tmp_path / "only"
    only.mkdir()
    monkeypatch.setenv("PATH", str(only))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    for name, matching in (("g++", CPU), ("gcc", CUDA)):
        (only / name).write_text("#!/bin/sh\n")
        (only / name).chmod(0o755)
        for device in (CPU, CUDA):
            assert (missing_compiler(device) == "") == (device == matching), (name, device)
        (only / name).unlink()
    for name, matching in (("CXX", CPU), ("CC", CUDA)):
        monkeypatch.setenv(name, shutil.which("sh", path="/bin:/usr/bin") or "")
        for device in (CPU, CUDA):
            assert (missing_compiler(device) == "") == (device == matching), (name, device)
        monkeypatch.delenv(name)


def test_schedules_that_take_blocks_apart_cannot_be_compiled() -> None:
    deep = MODEL | {"layers": 4}
    with pytest.raises(RecipeError, match=r"run\.compile.*takes the backward pass of a block apart"):
        recipe("blocks", 2, parallel={"pipeline": 2, "schedule": "zbv"}, model=deep)


def test_attention_within_documents_is_rejected_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    check_isolation(CPU)
    with pytest.raises(LaunchError, match=r"data\.isolate.*does not support the device mps.*data\.isolate=false"):
        check_isolation(torch.device("mps"))
    with pytest.raises(LaunchError, match=r"model\.sliding_window=8: .*mps.*data\.sequence_length=8"):
        check_isolation(torch.device("mps"), 8)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    check_isolation(CPU)
    with pytest.raises(LaunchError, match=r"data\.isolate.*no C compiler.*gcc.*data\.isolate=false"):
        check_isolation(CUDA)
