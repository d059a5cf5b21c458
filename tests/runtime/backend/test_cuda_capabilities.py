"""The table of compute capabilities against torch's own answers, asked for devices that are not here."""

import ast
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.device_interface import CudaInterface, caching_worker_device_properties

from hlat.config.load import parse_recipe
from hlat.hardware import load_catalog
from hlat.optim import adamw as adamw_bf16
from hlat.optim import adamw_reference
from hlat.parallel import decide_compilation
from hlat.parallel.device_support import check_isolation
from hlat.runtime.backend.base import AttentionHeads
from hlat.runtime.backend.cuda import AMD, NVIDIA, GpuCapabilities
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.join import Runtime
from hlat.runtime.errors import LaunchError
from hlat.training import numerics as precision
from tests.support.rehearsal.small_recipes import SMALL, recipe_of

CUDA, META = torch.device("cuda"), torch.device("meta")
NVIDIAS = [(5, 2), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
AMDS = {  # what torch reports -> architecture
    (9, 0): "gfx90a",
    (9, 4): "gfx942",
    (9, 5): "gfx950",
    (10, 3): "gfx1030",
    (11, 0): "gfx1100",
}


def _torch_supports(vendor: str, capability: tuple[int, int], feature: str) -> bool:
    """Evaluate the condition that torch's own tests have for a feature.

    Their module needs packages that torch does not install, so that only these functions are taken from it.
    """
    source = (Path(torch.__file__).parent / "testing" / "_internal" / "common_cuda.py").read_text(encoding="utf-8")
    functions = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith(("evaluate_platform_supports_", "evaluate_gfx_"))
    ]
    is_amd = vendor == AMD
    known: dict[str, Any] = {
        "torch": torch,
        "os": os,
        "TEST_WITH_ROCM": is_amd,
        "ROCM_VERSION": (7, 1),
        "TEST_CUDA": not is_amd,
        "TEST_XPU": False,
        "IS_WINDOWS": False,
        "SM80OrLater": not is_amd and capability >= (8, 0),
        "SM90OrLater": not is_amd and capability >= (9, 0),
    }
    exec(compile(ast.Module(functions, []), "common_cuda.py", "exec"), known)
    return bool(known[f"evaluate_platform_supports_{feature}"]())


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, tuple[int, int]], None]:
    """Function that lets torch believe in a GPU of a vendor and capability."""

    def show(vendor: str, capability: tuple[int, int]) -> None:
        properties = SimpleNamespace(major=capability[0], minor=capability[1], gcnArchName=AMDS.get(capability, ""))
        monkeypatch.setattr(torch.version, "hip", "7.1" if vendor == AMD else None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        # torch 2.14 asks what its compiler has stored of each device.
        monkeypatch.setitem(caching_worker_device_properties, "cuda", [properties])

    return show


@pytest.mark.parametrize("capability", NVIDIAS)
def test_the_table_for_nvidia_is_that_of_torch(present, capability: tuple[int, int]) -> None:
    present(NVIDIA, capability)
    ours = GpuCapabilities(NVIDIA, capability)
    assert ours.has("bf16") is torch.cuda.is_bf16_supported(including_emulation=False)
    assert ours.has("tf32") is torch.cuda.is_tf32_supported()
    assert ours.has("triton") is CudaInterface.is_triton_capable() is (ours.compile_obstacle == "")
    assert ours.has("fp8") is _torch_supports(NVIDIA, capability, "fp8") is (ours.fp8_refusal == "")
    assert ours.has("flash") is _torch_supports(NVIDIA, capability, "flash_attention")
    assert ours.has("efficient") is _torch_supports(NVIDIA, capability, "efficient_attention")
    assert backend_of(CUDA).has_fast_bf16(CUDA) is ours.has("bf16")


@pytest.mark.parametrize("capability", AMDS)
def test_the_table_for_amd_is_that_of_torch_but_for_what_was_not_tried(present, capability: tuple[int, int]) -> None:
    """Torch calls bf16 supported on every GPU of AMD, also where no instruction multiplies it."""
    present(AMD, capability)
    ours = GpuCapabilities(AMD, capability)
    assert torch.cuda.is_bf16_supported() and ours.has("bf16") is (capability != (10, 3))
    assert ours.has("tf32") is torch.cuda.is_tf32_supported()
    assert ours.has("triton") is CudaInterface.is_triton_capable() is True
    for feature in ("flash", "efficient"):
        assert ours.has(feature) is _torch_supports(AMD, capability, f"{feature}_attention"), feature
    assert "MI300" in ours.fp8_refusal and "fnuz" in ours.fp8_refusal


def test_an_mi200_is_not_taken_for_a_hopper(present) -> None:
    """Both report (9, 0)."""
    present(AMD, (9, 0))
    assert backend_of(CUDA).fp8_refusal(CUDA)
    assert not _torch_supports(AMD, (9, 0), "fp8")
    present(NVIDIA, (9, 0))
    assert backend_of(CUDA).fp8_refusal(CUDA) == ""


BF16, FP32 = torch.bfloat16, torch.float32
CHOICES = [
    # vendor, capability, dtype, width of a head, grouped, deterministic -> kernel; read from sdp_utils.cpp
    (NVIDIA, (8, 0), BF16, 128, True, True, "flash_attention"),
    (NVIDIA, (9, 0), BF16, 128, True, True, "flash_attention"),
    (NVIDIA, (9, 0), BF16, 128, True, False, "cudnn_attention"),
    (NVIDIA, (9, 0), BF16, 256, False, False, "cudnn_attention"),
    (NVIDIA, (10, 0), BF16, 256, False, False, "flash_attention"),
    (NVIDIA, (10, 3), BF16, 64, False, False, "cudnn_attention"),
    (NVIDIA, (12, 0), BF16, 64, False, False, "flash_attention"),
    (NVIDIA, (8, 9), BF16, 200, False, True, "efficient_attention"),
    (NVIDIA, (8, 9), BF16, 200, True, True, "math"),
    (NVIDIA, (8, 0), BF16, 200, False, True, "flash_attention"),
    (NVIDIA, (8, 0), BF16, 288, False, True, "efficient_attention"),
    (NVIDIA, (9, 0), FP32, 128, False, True, "efficient_attention"),
    (NVIDIA, (9, 0), FP32, 128, True, True, "math"),
    (NVIDIA, (9, 0), FP32, 126, False, True, "math"),
    (NVIDIA, (7, 5), FP32, 126, False, True, "efficient_attention"),
    (NVIDIA, (7, 5), BF16, 128, False, True, "math"),
    (NVIDIA, (7, 5), torch.float16, 128, False, True, "efficient_attention"),
    (NVIDIA, (9, 0), torch.float64, 128, False, True, "math"),
    (AMD, (9, 4), BF16, 512, False, False, "flash_attention"),
    (AMD, (11, 0), BF16, 512, False, False, "math"),
    (AMD, (9, 0), FP32, 128, False, True, "efficient_attention"),
    (AMD, (10, 3), BF16, 64, False, True, "math"),
]


@pytest.mark.parametrize(("vendor", "capability", "dtype", "width", "grouped", "deterministic", "kernel"), CHOICES)
def test_the_kernel_of_attention_is_the_one_that_torch_chooses(
    vendor, capability, dtype, width, grouped, deterministic, kernel
) -> None:
    heads, backend = AttentionHeads(dtype, width, grouped), backend_of(CUDA).of_chip(vendor, capability)
    assert backend.attention_kernel(heads, deterministic, META).name == kernel
    assert kernel.upper() in torch.nn.attention.SDPBackend.__members__


def test_blocks_are_not_compiled_where_triton_cannot(present) -> None:
    recipe = recipe_of(1, precision={"mode": "mixed"})
    forced = recipe.model_copy(update={"run": recipe.run.model_copy(update={"compile": "blocks"})})
    present(NVIDIA, (6, 1))
    assert "compute capability 7.0" in decide_compilation(recipe, CUDA).reason
    with pytest.raises(LaunchError, match=r"run\.compile=blocks: Triton needs .* this one has 6\.1"):
        decide_compilation(forced, CUDA)
    with pytest.raises(LaunchError, match=r"data\.isolate=true.*Triton needs"):
        check_isolation(CUDA)
    assert adamw_bf16.kernel_for(CUDA) is adamw_reference.update
    present(NVIDIA, (7, 5))
    assert "no bf16 below compute capability 8.0" in decide_compilation(recipe, CUDA).reason
    assert backend_of(CUDA).compile_refusal(FP32, 0.0, 1, CUDA) == ""
    present(NVIDIA, (8, 0))
    assert backend_of(CUDA).compile_refusal(BF16, 0.0, 1, CUDA) == ""


@pytest.mark.parametrize(("capability", "mode", "warns"), [((7, 5), "mixed", True), ((7, 5), "fp32", False),
                                                           ((8, 0), "bf16-sr", False)])  # fmt: skip
def test_a_precision_mode_that_the_gpu_emulates_is_warned_of(present, capability, mode: str, warns: bool) -> None:
    present(NVIDIA, capability)
    recipe = parse_recipe({**SMALL, "precision": {"mode": mode}})
    same, line = precision.resolve_precision(recipe, Runtime(CUDA), None)
    assert same is recipe
    assert (line is not None and f"precision.mode={mode}" in line and "8.0" in line) if warns else line is None


def test_every_gpu_of_the_catalog_has_a_capability() -> None:
    """Published by NVIDIA: data-centre and consumer chips of one generation differ in the minor number."""
    chips = load_catalog().chips
    gpus = {chip.name: chip.capability for chip in chips if any(name.startswith("NVIDIA") for name in chip.names)}
    assert gpus and None not in gpus.values()
    assert (gpus["A100 80GB"], gpus["A10G"], gpus["RTX 4090"]) == ((8, 0), (8, 6), (8, 9))
    assert (gpus["H200 SXM"], gpus["B200"], gpus["GB300"]) == ((9, 0), (10, 0), (10, 3))
    assert all((chip.capability is not None) == (chip.device == "cuda") for chip in chips)
