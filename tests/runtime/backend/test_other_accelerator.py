"""An accelerator is added by one module and one line in the table: a run uses what it says."""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from hlat.config import Recipe
from hlat.config.load import parse_recipe
from hlat.hardware import peak_flops
from hlat.model import DocumentMask, attention_kernel
from hlat.optim.adamw import kernel_for
from hlat.optim.adamw_reference import update
from hlat.parallel import build_parallel
from hlat.precision import check_fp8
from hlat.rehearsal import rehearse
from hlat.runtime.backend.base import AttentionHeads, Backend
from hlat.runtime.backend.device import has_fast_bf16
from hlat.runtime.backend.table import backend_of, interface_variables
from hlat.runtime.distributed.join import Runtime
from hlat.runtime.errors import LaunchError
from hlat.training import run
from tests.support.model.kernel_cases import torch_only
from tests.support.rehearsal.small_recipes import recipe_of
from tests.support.runtime import other_accelerator
from tests.support.runtime.registering import registered

CPU = torch.device("cpu")
MODULE = "tests.support.runtime.other_accelerator"

# Capabilities that a run in fp32 of one process has to ask for.
OF_A_RUN = {
    *("configure_process", "configure_products", "is_shared", "chip_name", "product_dtype", "uses_host_threads"),
    *("fused_adamw", "pins_memory", "sums_norms_in_order", "compile_refusal", "materialises_masks"),
    *("describe", "synchronize", "peak_memory_bytes", "deterministic_mode"),
}


@pytest.fixture
def other() -> Iterator[None]:
    """The CPU of this machine, described as another accelerator."""
    with registered("cpu", MODULE):
        other_accelerator.asked.clear()
        yield
    assert backend_of(CPU).device_type == "cpu", "the table is as before"


@pytest.fixture
def recipe(tiny_recipe: str, corpus: Path, tmp_path: Path):
    """Function that makes the tiny recipe with a precision mode."""

    def make(mode: str, name: str) -> Recipe:
        content = yaml.safe_load(tiny_recipe)
        content["run"]["dir"] = str(tmp_path / name)
        content["data"] |= {"path": str(corpus), "prepared_dir": str(tmp_path / "data")}
        content["training"] |= {"steps": 4, "log_every": 1}
        content["schedule"]["warmup_steps"] = 2
        content["optimizer"]["clip_norm"] = None
        content["precision"] = {"mode": mode}
        content["tracking"] = {"tensorboard": False, "console": "plain"}
        return parse_recipe(content)

    return make


def losses(recipe: Recipe) -> list[float]:
    lines = map(json.loads, (recipe.run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_a_run_uses_the_registered_backend(other: None, recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HLAT_VERBOSE", "1")
    said = io.StringIO()
    run(recipe("fp32", "other"), stream=said)
    assert "on other (a chip of next year)" in said.getvalue()
    assert "no known benefit on other; run.compile=blocks forces it" in said.getvalue()
    assert other_accelerator.asked >= OF_A_RUN


def test_the_same_model_is_trained_whatever_kernels_the_backend_names(recipe) -> None:
    """In bf16-sr all kernels of the optimizer give the same bits; fused norms, RoPE, SwiGLU and loss would not.

    The norm is summed in another order, but nothing is clipped here.
    """
    with torch_only():
        run(recipe("bf16-sr", "plain"), stream=io.StringIO())
    with registered("cpu", MODULE):
        run(recipe("bf16-sr", "other"), stream=io.StringIO())
    plain, others = (losses(recipe("bf16-sr", name)) for name in ("plain", "other"))
    assert len(plain) == 4 and plain == others


def test_each_decision_follows_the_registered_backend(other: None) -> None:
    assert kernel_for(CPU) is update and has_fast_bf16(CPU)
    assert interface_variables()[0] == "OTHER_SOCKET_IFNAME"
    with pytest.raises(LaunchError, match="no fp8 products on a other device"):
        check_fp8(CPU)
    assert "threads" not in peak_flops(CPU, torch.float32).source
    isolated = recipe_of(data={"path": "none", "sequence_length": 32, "tokenizer": {"train": "char"}, "isolate": True})
    with pytest.raises(LaunchError, match=r"data\.isolate=true.*does not support the device"):
        build_parallel(isolated, Runtime(CPU), seed=1)
    with pytest.raises(LaunchError, match=r"data\.isolate=true"):
        DocumentMask.from_positions(torch.arange(4)[None], ((0, 4),))
    assert attention_kernel(AttentionHeads(torch.float32, 16, True, limited=True), True, CPU).name == "none"


def test_a_pipeline_is_refused_where_groups_cannot_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backend, "can_send", lambda self, group: False)
    with pytest.raises(LaunchError, match=r"parallel\.pipeline=2.*no send and receive.*parallel\.pipeline=1"):
        rehearse(recipe_of(2, parallel={"pipeline": 2}), 2)
    rehearse(recipe_of(2, parallel={"zero": 1}), 2)


def test_a_recipe_may_name_the_registered_device_type() -> None:
    """In a process of its own: torch can rename its device type for other accelerators once."""
    program = f"""
import torch
from hlat.runtime.process import RankInfo
from hlat.runtime.errors import LaunchError
from hlat.runtime.backend.table import BACKENDS
from hlat.runtime.backend.device import choose_device
BACKENDS["other"] = {MODULE!r}
torch.utils.rename_privateuse1_backend("other")
torch.accelerator.current_accelerator = lambda check_available=False: torch.device("other")
from hlat.config import recipe_schema
from hlat.config.load import parse_recipe
recipe = {{
    "run": {{"device": "other"}}, "training": {{"steps": 3}},
    "model": {{"vocab_size": 64, "layers": 1, "hidden_size": 32, "intermediate_size": 96, "heads": 4}},
    "data": {{"path": "x", "sequence_length": 16, "tokenizer": {{"train": "char"}}}},
}}
chosen = choose_device(parse_recipe(recipe).run.device, RankInfo(1, 2, 1))
assert chosen == torch.device("other"), chosen
print(recipe_schema()["$defs"]["RunConfig"]["properties"]["device"]["enum"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['auto', 'cpu', 'cuda', 'neuron', 'other']"
