"""The table of each backend against what torch itself does on this machine, or says of devices that are not here."""

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import ProcessGroup
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

import hlat
from hlat.runtime.backend.base import Backend
from hlat.runtime.backend.device import choose_device
from hlat.runtime.backend.table import BACKENDS, backend_of, interface_variables, types_with
from hlat.runtime.errors import LaunchError
from hlat.runtime.process import RankInfo

CPU = torch.device("cpu")
SOURCES = Path(hlat.__file__).parent


def names_of(kind: type) -> set[str]:
    """Capabilities that a class defines itself."""
    return {name for name in vars(kind) if not name.startswith("_")}


@pytest.mark.parametrize("device_type", BACKENDS)
def test_a_backend_answers_questions_that_every_backend_answers(device_type: str) -> None:
    """A misspelt capability would never be asked for."""
    backend = backend_of(device_type)
    assert backend.device_type == device_type and backend_of(device_type) is backend
    for kind in type(backend).__mro__[:-2]:
        assert names_of(kind) - {"device_type"} <= names_of(Backend), kind


def test_every_capability_is_asked_for() -> None:
    """Outside of the backends: an answer that nobody asks for is a claim that nothing checks."""
    own = {SOURCES / "runtime" / "backend" / f"{name}.py" for name in ("base", *BACKENDS)}
    asked = {
        node.attr
        for file in SOURCES.rglob("*.py")
        if file not in own
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    }
    assert names_of(Backend) - asked == set()


def test_the_collective_backends_are_those_of_torch() -> None:
    defaults = dist.Backend.default_device_backend_map
    for device_type in set(BACKENDS) & set(defaults):
        collectives = backend_of(device_type).collectives
        assert collectives is not None and collectives.name == defaults[device_type]
    assert interface_variables() == ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def test_torch_lists_the_devices_with_fused_adamw() -> None:
    """Torch refuses other devices; that list has device types for which the kernel is not complete, such as neuron."""
    assert set(types_with(lambda backend: backend.fused_adamw)) <= set(_get_fused_kernels_supported_devices())


def test_a_cpu_computes_in_float64() -> None:
    assert backend_of(CPU).float64
    third = torch.full((2, 2), 1 / 3, dtype=torch.float64)
    assert (third @ third).tolist() == [[2 / 9] * 2] * 2


def test_a_cpu_multiplies_int64_matrices_modulo_2_to_64() -> None:
    assert backend_of(CPU).has_integer_mv
    rows, weights = [[1 << 62, 3], [-5, 1 << 40]], [7, -(1 << 41)]
    exact = [sum(a * b for a, b in zip(row, weights, strict=True)) for row in rows]
    wrapped = [(value + (1 << 63)) % (1 << 64) - (1 << 63) for value in exact]
    assert torch.mv(torch.tensor(rows), torch.tensor(weights)).tolist() == wrapped


def test_torchs_norm_on_a_cpu_adds_squares_in_order() -> None:
    """A sequential fp32 sum of n equal terms stops growing at 2^24 of them; a tree would have no error here."""
    assert backend_of(CPU).sums_norms_in_order
    ones = torch.ones(1 << 22)
    (norm,) = torch._foreach_norm([ones * 0.3])
    exact = 0.3 * 2.0**11
    assert abs(float(norm) - exact) > 1e-5 * exact


def test_torch_rounds_gradients_of_an_embedding_on_a_cpu() -> None:
    """4,096 ones: a sum in bf16 stops at 256."""
    assert backend_of(CPU).rounds_embedding_gradients
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    F.embedding(torch.ones(4096, dtype=torch.int64), weight).sum().backward()
    assert weight.grad is not None and float(weight.grad[1]) < 4096


def test_flex_attention_has_no_backward_pass_on_a_cpu() -> None:
    kernel = backend_of(CPU).document_kernel
    assert kernel is not None and not kernel.is_compiled
    q = torch.ones(1, 1, 4, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="CPU"):
        flex_attention(q, q, q)


def test_a_cpu_pins_no_memory() -> None:
    backend, memory = backend_of(CPU), torch.ones(4096)
    assert not backend.pins_memory and not backend.pin_memory(memory, CPU)
    if not torch.accelerator.is_available():
        with pytest.raises(RuntimeError):
            memory.pin_memory()


def test_bf16_is_multiplied_in_fp32_where_it_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(CPU)
    for fast, product in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(type(backend), "has_fast_bf16", lambda self, device, fast=fast: fast)
        assert backend.product_dtype(torch.bfloat16) == product
        assert backend.product_dtype(torch.float64) == torch.float64


def test_memory_of_a_cpu_is_that_of_the_machine() -> None:
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        pytest.skip("no /proc/meminfo on this system")
    kib = int(meminfo.read_text().split()[1])  # MemTotal: less than all pages by what the kernel reserves
    assert 0.9 < kib * 1024 / backend_of(CPU).memory_bytes(CPU) <= 1.0


def test_an_unknown_accelerator_gets_conservative_answers() -> None:
    unknown = backend_of("some-npu")
    assert type(unknown) is Backend and unknown.device_type == "some-npu"
    assert unknown.collectives is unknown.document_kernel is None
    facts = ("fused_adamw", "float64", "pins_memory", "is_everywhere", "is_shared", "uses_host_threads")
    assert not any(getattr(unknown, name) for name in facts)
    assert unknown.rounding_kernel == "torch"
    assert "some-npu" in unknown.fp8_refusal(torch.device("meta"))
    assert unknown.compile_refusal(torch.bfloat16, 1e30, 1, CPU) == (
        "no known benefit on some-npu; run.compile=blocks forces it"
    )
    assert types_with(lambda backend: backend.fused_adamw) == ("cpu", "cuda")


def test_flex_attention_is_used_on_intels_gpus() -> None:
    """Torch implements its backward pass there; hlat describes nothing else of them."""
    kernel = backend_of("xpu").document_kernel
    assert kernel is not None and kernel.name == "flex" and kernel.is_compiled


@pytest.fixture
def one_neuron_core(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A process that sees one Neuron device; returns the list of selected indexes."""
    selected: list[int] = []
    torch_device = torch.device  # "neuron" is a device type only once TorchNeuron has registered it
    monkeypatch.setattr(
        torch, "device", lambda kind, *index: ("neuron", *index) if kind == "neuron" else torch_device(kind, *index)
    )
    found = type("Found", (), {"type": "neuron"})()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "set_device_index", selected.append)
    return selected


def test_a_process_takes_the_only_neuron_core_that_a_scheduler_shows_it(
    one_neuron_core: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # a setting for other devices
    with pytest.raises(LaunchError, match="process 3 of this machine has no neuron device of its own"):
        choose_device("auto", RankInfo(3, 4, 3))
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "3")
    assert choose_device("neuron", RankInfo(3, 4, 3)) == ("neuron", 0)
    assert one_neuron_core == [0]


@pytest.mark.parametrize(("configured", "cores"), [(None, None), ("2", 2), ("0", None), ("many", None)])
def test_the_cores_of_a_neuron_device_are_those_of_the_environment(
    configured: str | None, cores: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
    if configured is not None:
        monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", configured)
    assert backend_of("neuron").cores_per_device() == cores
    assert backend_of("cuda").cores_per_device() is None


def test_a_process_group_in_python_is_asked_for_send_and_receive() -> None:
    class Silent(ProcessGroup):
        """A group with collectives only, as in the public beta of TorchNeuron."""

    class Talking(Silent):
        """A group that sends."""

        def send(self, tensors, rank, tag):
            """Send nothing."""

    for device_type in (*BACKENDS, "some-npu"):
        backend = backend_of(device_type)
        assert not backend.can_send(Silent(0, 2)) and backend.can_send(Talking(0, 2))
        assert backend.can_send(ProcessGroup(dist.HashStore(), 0, 1))
