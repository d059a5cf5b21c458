"""The kernels are used where they can be; torch computes without a compiler, on other devices, and compiled."""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from hlat.model import IGNORED, CrossEntropy, attend, head_loss
from hlat.model.kernels import library
from hlat.model.kernels.attention import attention_is_used_on
from hlat.model.kernels.library import are_used_on, describe_kernels, has_kernels
from hlat.model.pointwise import gated, rms_norm
from hlat.runtime.backend import c_library, cpu
from hlat.runtime.backend.c_library import CompilationFailed, begin_compiling, compile_c_library, find_c_compiler
from hlat.runtime.backend.table import backend_of, simulated_backend
from hlat.runtime.distributed.join import fake_rank
from tests.support.model.kernel_cases import CASES, normal, output_and_gradients, same_bits, torch_only

CPU = torch.device("cpu")


@pytest.fixture
def compiled_again() -> Iterator[None]:
    """The library is compiled anew within the test, and after it."""
    library.library.cache_clear()
    yield
    library.library.cache_clear()


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process has compiled anything: the home of this user cannot be written."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")


@pytest.mark.usefixtures("compiled_again")
@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("false", "false failed"), ("no-such-compiler", "no-such-compiler")],
    ids=["fails", "absent"],
)
def test_without_a_working_compiler_torch_computes_and_the_reason_is_logged(
    compiler: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", compiler)
    function, operands = CASES[0](torch.bfloat16, 64)
    with caplog.at_level(logging.WARNING):
        found = output_and_gradients(function, operands)
    assert reason in caplog.text and describe_kernels(CPU) == "torch"
    with torch_only():
        expected = output_and_gradients(function, operands)
    assert all(same_bits(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.usefixtures("compiled_again")
@pytest.mark.parametrize(
    ("flags", "feature"),
    [("-mno-avx512f", "avx512f"), ("-mno-avx512bf16", "avx512_bf16"), ("-mno-avx2", "avx2")],
    ids=["AVX2", "no bf16", "neither"],
)
def test_code_for_other_processors_differs_by_roundings_only(
    flags: str, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other instructions: vectors of AVX2, or of no processor in particular; conversions to bf16 by integers.

    A bf16 result may be the neighbour of the other, 2^-7 away, if the exact one is close to the middle between them.
    """
    if library.library() is None or feature not in Path("/proc/cpuinfo").read_text(encoding="ascii").split():
        pytest.skip("this processor has no such instructions")
    own = {case: output_and_gradients(*case(torch.bfloat16, 100)) for case in CASES}
    name = describe_kernels(CPU)
    library.library.cache_clear()
    monkeypatch.setenv("CC", f"{find_c_compiler()} {flags}")
    assert describe_kernels(CPU) != name, "other bits, another name"
    for case in CASES:
        other = output_and_gradients(*case(torch.bfloat16, 100))
        for mine, theirs in zip(own[case], other, strict=True):
            error = (mine.double() - theirs.double()).abs()
            assert bool((error <= 2.0**-7 * mine.double().abs() + 2.0**-20 * mine.double().abs().amax()).all())
            assert float((error > 0).double().mean()) < 0.01, "few results are that close to the middle"


def test_the_name_of_the_kernels_has_the_compiler_and_the_instructions() -> None:
    """As the compiler itself says."""
    compiler = find_c_compiler()
    assert compiler is not None
    command = [*compiler.split(), "-march=native", "-dM", "-E", "-x", "c", "/dev/null"]
    macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    version = re.search('#define __VERSION__ "(.*)"', macros)
    assert version is not None
    names = {"__AVX512BF16__": "avx512-bf16", "__AVX512F__": "avx512", "__AVX2__": "avx2"}
    instructions = next(name for macro, name in names.items() if macro in macros)
    name = version[1] if "__clang__" in macros else f"gcc {version[1]}"
    assert describe_kernels(CPU) == f"fused C kernels ({name}, {instructions})"


def test_threads_are_those_of_a_preloaded_openmp_library(tmp_path: Path) -> None:
    """Torch's calls go there too: the dynamic linker looks at preloaded libraries first."""
    source, preloaded = tmp_path / "openmp.c", tmp_path / "openmp.so"
    source.write_text("void GOMP_parallel(void (*f)(void *), void *a, unsigned n, unsigned m) { f(a); }")
    compiler = find_c_compiler()
    assert compiler is not None
    subprocess.run([*compiler.split(), "-shared", "-fPIC", str(source), "-o", str(preloaded)], check=True)
    code = (
        "import ctypes, sys; from hlat.model.kernels.library import find_openmp\n"
        "address = lambda function: ctypes.cast(function, ctypes.c_void_p).value\n"
        "assert address(find_openmp()) == address(ctypes.CDLL(sys.argv[1]).GOMP_parallel)"
    )
    environment = os.environ | {"LD_PRELOAD": str(preloaded)}
    subprocess.run([sys.executable, "-c", code, str(preloaded)], env=environment, check=True)


@pytest.mark.usefixtures("no_cache")
def test_the_source_of_a_library_and_its_folder_are_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cache nothing stays on the disk."""
    monkeypatch.setattr(c_library.tempfile, "tempdir", str(tmp_path))
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }")
    assert compile_c_library(source).one() == 1
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.usefixtures("no_cache")
def test_a_library_compiled_in_the_background_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_library.tempfile, "tempdir", str(tmp_path))
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }")
    begin_compiling(source)
    monkeypatch.setenv("CC", "false")  # a second compilation would fail
    assert compile_c_library(source).one() == 1
    assert list(tmp_path.iterdir()) == [source]
    with pytest.raises(CompilationFailed, match="false failed"):
        compile_c_library(source)


@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("compiler", ["false", "/no/such/compiler"])
def test_problems_in_the_background_are_those_of_the_call_that_needs_the_library(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(c_library.tempfile, "tempdir", str(tmp_path))
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }")
    monkeypatch.setenv("CC", compiler)
    begin_compiling(source)
    with pytest.raises((CompilationFailed, OSError)):
        compile_c_library(source)
    begin_compiling(source)
    monkeypatch.delenv("CC")
    assert compile_c_library(source).one() == 1  # with the compiler that is there now
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.usefixtures("no_cache")
def test_a_process_that_ends_before_its_compiler_leaves_no_folder(tmp_path: Path) -> None:
    """Nor does its compiler go on, or a program that this has started."""
    source, folder, compiler, pids = (tmp_path / name for name in ("one.c", "temporary", "compiler", "pids"))
    source.write_text("int one(void) { return 1; }")
    folder.mkdir()
    os.mkfifo(pids)  # whoever reads it waits until the compiler has written
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *--version) exit ;; esac\nsleep 600 &\necho $$ $! > {pids}\ntouch $TMPDIR/a\nwait\n'
    )
    compiler.chmod(0o755)
    code = (
        "import sys, pathlib, hlat.runtime.backend.c_library as p\n"
        "p.begin_compiling(pathlib.Path(sys.argv[1])); print(open(sys.argv[2]).read())"
    )
    environment = os.environ | {"TMPDIR": str(folder), "CC": str(compiler)}
    command = [sys.executable, "-c", code, str(source), str(pids)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert list(folder.iterdir()) == []
    for pid in done.stdout.split():
        status = Path("/proc", pid, "stat")
        assert not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z", "it has ended"


@pytest.mark.usefixtures("no_cache")
def test_the_compiler_starts_before_torch_is_imported_if_the_kernels_will_be_used(tmp_path: Path) -> None:
    """Not for accelerators, for processors without AVX2, or where the system says nothing of its processors."""
    code = """
import pathlib, subprocess, sys
started = []
class Compiler:
    def __init__(self, command, **options):
        started.append(command)
    def poll(self):
        return 0
subprocess.Popen = Compiler
from hlat.model.kernels.source import begin_compilation
from hlat.model.kernels import source
source._PROCESSORS = pathlib.Path(sys.argv[1])
for device in sys.argv[2:]:
    begin_compilation(device)
assert "torch" not in sys.modules
print(len(started), sum("kernels.c" in " ".join(command) for command in started))
"""
    (tmp_path / "avx512").write_text("flags\t\t: fpu avx2 avx512f avx512bw\n")
    (tmp_path / "avx2").write_text("flags\t\t: fpu fma avx2\n")
    (tmp_path / "avx").write_text("flags\t\t: fpu avx\n")
    for processors, devices, compilations in (
        ("avx512", ["cpu"], "1 1"),
        ("avx512", ["cuda", "neuron"], "0 0"),
        ("avx2", ["cpu"], "1 1"),
        ("avx", ["cpu"], "0 0"),
        ("none", ["cpu"], "0 0"),
    ):
        command = [sys.executable, "-c", code, str(tmp_path / processors), *devices]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert done.stdout.split() == compilations.split()


def test_other_devices_use_torch() -> None:
    x = torch.ones(2, 4)
    assert has_kernels(x)
    with simulated_backend(backend_of("neuron")):
        assert not has_kernels(x) and describe_kernels(CPU) == "torch"


def test_other_processors_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr(cpu.CpuBackend, "pointwise_kernels", cpu.pointwise_kernels())
    assert not has_kernels(torch.ones(2, 4)) and describe_kernels(CPU) == "torch"


@pytest.mark.usefixtures("compiled_again")
def test_attention_that_the_compiler_left_out_is_torchs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A compiler may be told not to use what the processor has; without vectors it compiles no attention."""
    monkeypatch.setenv("CC", f"{find_c_compiler()} -mno-avx2")
    assert are_used_on(CPU) and not attention_is_used_on(CPU)
    assert "attention is computed by torch, more slowly" in caplog.text
    q, k, v = normal(3, 1, 2, 40, 16, dtype=torch.float32)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert same_bits(attend(q, k, v), expected)


def test_kernels_keep_to_the_instructions_that_torch_is_told_to_use() -> None:
    """The variable of torch that hides AVX-512 from it."""
    code = "from hlat.model.kernels import library; print(library.library().build)"
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.strip().endswith(", avx2")


def _pointwise(x: torch.Tensor) -> torch.Tensor:
    return gated(rms_norm(x, torch.ones(8), 1e-5), x)


def _loss(x: torch.Tensor) -> torch.Tensor:
    return head_loss(x, torch.ones(16, 8), torch.tensor([3, IGNORED, 15]), CrossEntropy())


@pytest.mark.parametrize("function", [_pointwise, _loss])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_compiled_code_has_the_formulas(function, needs_gradient: bool) -> None:
    """A compiler fuses them with what is around; it would have to stop at an operator."""
    graphs = []

    def record(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    x = torch.randn(3, 8, requires_grad=needs_gradient)
    torch.compile(function, backend=record, fullgraph=True)(x)
    assert len(graphs) == 1
    modules = [module for module in graphs[0].modules() if isinstance(module, torch.fx.GraphModule)]
    assert not any("hlat" in str(node.target) for module in modules for node in module.graph.nodes)


@pytest.mark.parametrize("case", CASES)
def test_results_of_fake_tensors_are_those_of_real_ones(case) -> None:
    """Shapes, dtypes and strides, and no others are allocated: a rehearsal counts them."""
    function, operands = case(torch.bfloat16, 32)
    real = output_and_gradients(function, operands)
    with FakeTensorMode(allow_non_fake_inputs=True):
        leaves = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).requires_grad_() for x in operands]
        out = function(*leaves)
        fake = [out, *torch.autograd.grad(out, leaves, torch.empty_like(out))]
    assert [(x.shape, x.dtype, x.stride()) for x in fake] == [(x.shape, x.dtype, x.stride()) for x in real]


@pytest.mark.usefixtures("compiled_again")
def test_a_rehearsal_compiles_nothing() -> None:
    with fake_rank(0, 1):
        assert has_kernels(normal(2, 2, dtype=torch.float32))
    assert library.library.cache_info().currsize == 0
