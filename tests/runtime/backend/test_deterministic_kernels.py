"""Numerics settings of torch, and the error for a kernel that is not deterministic."""

import os
import sys

import pytest
import torch

from hlat.runtime.backend import cuda
from hlat.runtime.backend.device import configure_numerics, has_fast_bf16
from hlat.runtime.distributed.join import join_run, joined_run
from hlat.runtime.errors import LaunchError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch):
    """Restore all settings after the test."""
    products = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = torch.get_deterministic_debug_mode(), [getattr(products, name) for name in names]
    for name in ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    for name in names:
        setattr(products, name, True)
    yield
    torch.set_deterministic_debug_mode(before[0])
    for name, value in zip(names, before[1], strict=True):
        setattr(products, name, value)


def test_deterministic_mode_raises_errors_and_not_only_warnings():
    """With warnings only, torch would still use the non-deterministic backward pass of fused attention on CUDA."""
    for device in (CPU, CUDA):
        configure_numerics(device, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        configure_numerics(device, deterministic=False)
        assert not torch.are_deterministic_algorithms_enabled()


def test_cublas_gets_a_fixed_workspace_unless_one_is_set(monkeypatch):
    configure_numerics(CUDA, deterministic=False)
    configure_numerics(CPU, deterministic=True)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    configure_numerics(CUDA, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    configure_numerics(CUDA, deterministic=False)  # as where run.deterministic=auto turns out to be false
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    for deterministic in (True, False):
        configure_numerics(CUDA, deterministic)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize("deterministic", [True, False])
def test_products_of_16_bit_numbers_accumulate_in_fp32(deterministic):
    configure_numerics(CUDA, deterministic)
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction


def test_the_compiler_is_configured_before_and_after_it_is_loaded(monkeypatch):
    """The compiler reads the variable when it is imported (over a second); ``join_run`` must not import it."""
    import torch._inductor.config as settings  # noqa: PLC0415

    monkeypatch.setattr(settings, "deterministic", False)
    configure_numerics(CPU, deterministic=True)
    assert settings.deterministic and os.environ["TORCHINDUCTOR_DETERMINISTIC"] == "1"
    configure_numerics(CPU, deterministic=False)
    assert not settings.deterministic and os.environ["TORCHINDUCTOR_DETERMINISTIC"] == "0"
    monkeypatch.delitem(sys.modules, "torch._inductor.config")
    configure_numerics(CPU, deterministic=True)
    assert "torch._inductor.config" not in sys.modules


def test_the_error_for_a_refused_kernel_names_the_field():
    index = torch.tensor([1])
    with pytest.raises(LaunchError, match=r"run\.deterministic=false") as refused, joined_run("cpu"):
        torch.zeros(3).put_(index, torch.ones(1), accumulate=False)
    assert "put_" in str(refused.value) and isinstance(refused.value.__cause__, RuntimeError)
    with joined_run("cpu", deterministic=False):
        torch.zeros(3).put_(index, torch.ones(1), accumulate=False)
    with pytest.raises(RuntimeError, match="size"), joined_run("cpu"):
        torch.zeros(3) @ torch.zeros(4)


def test_by_default_kernels_are_deterministic():
    join_run("cpu")
    assert torch.get_deterministic_debug_mode() == 2


@pytest.mark.parametrize(("capability", "fast"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_bf16_is_fast_on_nvidia_gpus_from_ampere_on(monkeypatch, capability, fast):
    monkeypatch.setattr(cuda, "compute_capability", lambda device: capability)
    assert has_fast_bf16(CUDA) is fast
