"""Peak FLOP/s: published for a chip of the catalog, measured for any other with all libraries of products."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hlat.hardware import PeakFlops, load_catalog, machine, peak_again, peak_flops
from hlat.hardware.machine import MatmulRate, measure_matmul
from hlat.model import product_library
from hlat.model.kernels import matmul
from hlat.runtime.backend import neuron
from hlat.runtime.backend.base import TORCH
from hlat.runtime.backend.cpu import CpuBackend
from hlat.runtime.backend.device import PRODUCTS, has_fast_bf16
from hlat.runtime.backend.table import backend_of
from hlat.runtime.terminal import plural

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[torch.dtype]]:
    """Make torch report an accelerator of a given name; returns the list of dtypes that are measured."""

    def pretend(name: str) -> list[torch.dtype]:
        measured: list[torch.dtype] = []

        def measure(device: torch.device, dtype: torch.dtype) -> MatmulRate:
            measured.append(dtype)
            return MatmulRate(flops=1.5e12, size=2048, library="torch")

        module = SimpleNamespace(get_device_name=lambda device: name)
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        monkeypatch.setattr(machine, "measure_matmul", measure)
        return measured

    return pretend


@pytest.fixture
def fp32_precision() -> object:
    """Restore torch's fp32 matmul precision."""
    yield
    torch.set_float32_matmul_precision("highest")


def test_a_known_gpu_has_its_published_peak(as_gpu: Callable[[str], list[torch.dtype]]) -> None:
    measured = as_gpu("NVIDIA H200")
    bf16, fp32 = peak_flops(CUDA, torch.bfloat16), peak_flops(CUDA, torch.float32)
    assert (bf16.value, fp32.value) == (989.5e12, 67e12)
    assert bf16.source == f"H200 SXM, bfloat16: {load_catalog().sources['h200']}"
    assert measured == []


@pytest.mark.parametrize("name", ["AMD Instinct MI455X", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "A chip of next year"])
def test_an_unknown_gpu_is_measured(name: str, as_gpu: Callable[[str], list[torch.dtype]]) -> None:
    """Assuming the A100's peak led to a reported utilization of 563 % (AMD Primus, PR 772)."""
    measured = as_gpu(name)
    found = peak_flops(CUDA, torch.bfloat16)
    assert measured == [torch.bfloat16]
    assert found == PeakFlops(1.5e12, "measured here: bfloat16 products of 2048 x 2048 by torch")


def test_a_peak_that_is_measured_again_is_the_better_one_and_a_published_one_stays(
    as_gpu: Callable[[str], list[torch.dtype]],
) -> None:
    measured = as_gpu("A chip of next year")  # 1.5e12
    beside = PeakFlops(1e12, "measured here, beside another program")
    assert peak_again(beside, CUDA, torch.bfloat16).value == 1.5e12
    better = PeakFlops(2e12, "measured here")
    assert peak_again(better, CUDA, torch.bfloat16) is better
    assert len(measured) == 2
    published = as_gpu("NVIDIA H200")
    assert peak_again(beside, CUDA, torch.bfloat16) is beside and published == []


@pytest.mark.parametrize("fast", [True, False])
def test_emulated_bf16_has_the_peak_of_fp32(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured with torch's emulation, the peak would be a hundredth of what hlat reaches by widening to fp32."""
    measured = []

    def measure(_: torch.device, dtype: torch.dtype) -> MatmulRate:
        measured.append(dtype)
        return MatmulRate(1e11, 1024, "torch")

    monkeypatch.setattr(CpuBackend, "has_fast_bf16", lambda self, device: fast)
    monkeypatch.setattr(machine, "measure_matmul", measure)
    found = peak_flops(torch.device("cpu"), torch.bfloat16)
    assert measured == [torch.bfloat16 if fast else torch.float32]
    assert ("in which bfloat16 is computed here" in found.source) == (not fast)


def test_a_dtype_without_a_published_figure_is_measured(as_gpu: Callable[[str], list[torch.dtype]]) -> None:
    measured = as_gpu("NVIDIA H200")
    assert peak_flops(CUDA, torch.float64).source.startswith("measured here: float64")
    assert measured == [torch.float64]


@pytest.mark.usefixtures("fp32_precision")
def test_fp32_has_the_tf32_peak_only_if_torch_uses_tf32(as_gpu: Callable[[str], list[torch.dtype]]) -> None:
    as_gpu("NVIDIA H200")
    torch.set_float32_matmul_precision("high")
    assert peak_flops(CUDA, torch.float32).value == 494.5e12
    assert peak_flops(CUDA, torch.bfloat16).value == 989.5e12
    torch.set_float32_matmul_precision("highest")
    assert peak_flops(CUDA, torch.float32).value == 67e12


@pytest.mark.parametrize(
    ("product", "logical", "tflops"),
    [("trn2.48xlarge\n", None, 2 * 667 / 8), ("trn2.48xlarge\n", "1", 667 / 8), ("trn1.32xlarge\n", None, 95)],
)
def test_a_neuron_device_has_the_peak_of_a_logical_core(
    product: str, logical: str | None, tflops: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "product_name"
    file.write_text(product)
    monkeypatch.setattr(neuron, "PRODUCT_NAME", file)
    monkeypatch.setattr(
        torch, "get_device_module", lambda device: SimpleNamespace(get_device_name=lambda d: "neuron:0")
    )
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
    if logical is not None:
        monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", logical)
    assert peak_flops(SimpleNamespace(type="neuron"), torch.bfloat16).value == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_is_measured(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a factor of 3 of a product timed here; by the time of the processor, which others do not take."""
    monkeypatch.setattr(machine, "measure_matmul", partial(measure_matmul, clock=time.thread_time))
    computed = dtype if has_fast_bf16(CPU) else torch.float32
    left, best = torch.full((512, 512), 0.5, dtype=computed), float("inf")
    for _ in range(20):
        begin = time.thread_time()
        left @ left
        best = min(best, time.thread_time() - begin)
    found = peak_flops(CPU, dtype)
    assert 1 / 3 < found.value / (2 * 512**3 / best) < 3
    assert found.source.startswith(f"measured here: {str(computed).removeprefix('torch.')} products of ")
    assert f" on {plural(torch.get_num_threads(), 'thread')}" in found.source


def test_measuring_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    peak_flops(CPU, torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


class _Clock:
    """Clock that advances ``tick`` seconds per reading; a product takes two readings, so one tick."""

    def __init__(self, tick: float) -> None:
        self.tick, self.now = tick, 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure with torch only, as on most devices."""
    monkeypatch.setattr(CpuBackend, "fp32_by_onednn", False)


@pytest.mark.usefixtures("torch_alone")
def test_the_rate_is_two_n_cubed_over_the_fastest_time() -> None:
    # 512 takes 1 ms; three of 1024 are expected to take 3 * 8 ms, which fit into 35 ms; then 2048 does not.
    best = measure_matmul(CPU, torch.float32, budget_seconds=0.035, clock=_Clock(0.001))
    assert best.size == 1024
    assert best.flops == pytest.approx(2 * 1024**3 / 0.001)


@pytest.mark.usefixtures("torch_alone")
def test_a_slow_chip_is_measured_only_at_the_smallest_size() -> None:
    clock = _Clock(10.0)
    best = measure_matmul(CPU, torch.float32, clock=clock)
    assert best == MatmulRate(pytest.approx(2 * 512**3 / 10.0), 512, "torch")
    assert clock.now <= 10 * 12  # 3 products of two readings each, and a reading per decision


@pytest.mark.usefixtures("torch_alone")
def test_a_clock_that_does_not_advance_does_not_divide_by_zero() -> None:
    readings = iter([0.0] * 7 + [1.0] * 1000)  # constant during the smallest size, past the deadline afterwards
    assert measure_matmul(CPU, torch.float32, clock=lambda: next(readings)).flops > 0


@pytest.mark.parametrize("seconds", [{"torch": 0.004, "oneDNN": 0.002}, {"torch": 0.002, "oneDNN": 0.004}])
def test_the_peak_is_that_of_the_fastest_library_of_training(
    seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Utilization is at most 1 by any library: the peak is the maximum over them, whichever of them is the fastest."""
    clock, calls = _Clock(0.0), dict.fromkeys(seconds, 0)

    def by(library: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            clock.now += seconds[library] * (len(x) / 512) ** 3
            calls[library] += 1
            return x

        return multiply

    monkeypatch.setattr(CpuBackend, "fp32_by_onednn", True)
    monkeypatch.setattr(machine, "PRODUCTS", {library: by(library) for library in seconds})
    rate = measure_matmul(CPU, torch.float32, budget_seconds=0.2, clock=clock)
    assert rate.flops == pytest.approx(2 * 512**3 / 0.002)
    assert rate.library == min(seconds, key=lambda name: seconds[name])
    # 3 x (4 + 2) ms at 512 and 8 times as much at 1,024 fit into 0.2 s; then the fastest fills the rest.
    assert min(calls.values()) == 6
    assert clock.now == pytest.approx(0.2, abs=0.016)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("emulated", ["cpu", ""])
def test_every_library_that_a_run_can_name_takes_part_in_the_peak(
    dtype: torch.dtype, onednn: bool, emulated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved names are a library and a remark, such as ``torch, widened to fp32``; torch computes the head always."""
    monkeypatch.setattr(CpuBackend, "fp32_by_onednn", onednn)
    monkeypatch.setattr(CpuBackend, "has_fast_bf16", lambda self, device: not emulated)
    monkeypatch.setattr(matmul, "_EMULATE_BF16", emulated)
    backend = backend_of(CPU)
    measured = backend.product_libraries(backend.product_dtype(dtype))
    assert {product_library(dtype, CPU).partition(",")[0], TORCH} <= set(measured) <= set(PRODUCTS)


@pytest.mark.parametrize("library", backend_of(CPU).product_libraries(torch.float32))
def test_a_library_multiplies_by_the_transposed_weight(library: str) -> None:
    """Whole numbers up to 8 and sums up to 8 x 8 x 24 are exact in fp32."""
    x, weight = (torch.arange(24.0 * rows).view(rows, 24) % 9 for rows in (5, 7))
    assert torch.equal(PRODUCTS[library](x, weight), x @ weight.T)
