"""The operators in Triton without a GPU: compiled to machine code for several, and run in Triton's interpreter."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest

pytest.importorskip("triton", reason="pip install -e '.[kernels]'")

import torch

from hlat.model.kernels.library import RESULTS, are_used_on, describe_kernels, in_triton
from hlat.runtime.backend.base import Backend
from hlat.runtime.backend.table import backend_of, simulated_backend
from hlat.runtime.distributed.join import fake_rank
from tests.support.optim.compiled import compiling

ROOT = Path(__file__).resolve().parents[3]
WIDTH, VOCABULARY, TOKENS = 4096, 32000, 4
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """An empty cache: kernels that an earlier run has compiled would prove nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def launched(capability: int | str, dtype: torch.dtype):
    """Compiled kernels of all operators, by name, for the shapes of a model, for a GPU as for ``compiling``."""
    x, weight = torch.ones(8, WIDTH, dtype=dtype), torch.ones(WIDTH, dtype=dtype)
    heads = torch.ones(1, 8, 8, 6, 128, dtype=dtype)[:, :, :, :4]  # queries of a fused projection
    gate, up = torch.ones(1, 8, 1, 2, WIDTH, dtype=dtype).unbind(-2)
    logits, of_tokens = torch.ones(TOKENS, VOCABULARY, dtype=dtype), torch.ones(TOKENS)
    operands = {
        "rms_norm": (x, weight, 1e-5),
        "rms_norm_backward": (x, x, weight, torch.ones(8, 1)),
        "rotate": (heads, torch.ones(8, 1, 1, 64), torch.ones(8, 1, 1, 64), 1),
        "swiglu": (gate, up),
        "swiglu_backward": (gate.contiguous(), gate, up, torch.empty_like(x).view(gate.shape), torch.empty_like(up)),
        "cross_entropy_sums": (logits, torch.arange(TOKENS)),
        "cross_entropy_gradient_": (logits, torch.arange(TOKENS), of_tokens, of_tokens),
        "first_equal": (logits, of_tokens),
    }
    assert operands.keys() == RESULTS.keys()
    with compiling(capability) as kernels:
        for name, given in operands.items():
            in_triton(name, RESULTS[name])(*given)
    assert len(kernels) == len(operands), "each operator is one kernel"
    return dict(zip(operands, kernels, strict=True))


def instructions(kernel) -> Counter[str]:
    return Counter(re.findall(r"^\s+(?:@\S+ )?([a-z0-9_.:]+)\s", kernel.asm["ptx"], re.MULTILINE))


@pytest.mark.parametrize(
    ("capability", "target", "dtype"),
    [
        pytest.param(80, "sm_80", torch.bfloat16, marks=pytest.mark.slow),
        (90, "sm_90a", torch.bfloat16),
        pytest.param(90, "sm_90a", torch.float32, marks=pytest.mark.slow),
        pytest.param(100, "sm_100a", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_every_operator_becomes_machine_code_without_atomic_operations(capability, target, dtype):
    """Additions to what other programs write would have another order each time. Results are rounded to nearest.

    Operands in memory without gaps are read 16 bytes at a time, and no register is spilled.
    """
    for name, kernel in launched(capability, dtype).items():
        assert f".target {target}" in kernel.asm["ptx"] and len(kernel.asm["cubin"]) > 1000, name
        counts = instructions(kernel)
        assert [each for each in counts if re.match(r"atom|red\.|ld\.local|st\.local", each)] == [], name
        assert counts["ld.global.v4.b32"] > 0, name
        writes_bf16 = dtype == torch.bfloat16 and name not in ("cross_entropy_sums", "first_equal")
        assert bool(counts["cvt.rn.bf16x2.f32"]) == writes_bf16, name


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gfx90a", "gfx942"])
def test_every_operator_becomes_machine_code_for_amd_without_atomic_operations(architecture):
    for name, kernel in launched(architecture, torch.bfloat16).items():
        code = kernel.asm["amdgcn"]
        assert architecture in code and len(kernel.asm["hsaco"]) > 1000, name
        assert re.findall(r"\b\w*atomic\w*|\bscratch_\w+", code) == [], name
        assert set(re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", code)) == {"0"}, name


def test_the_loss_reads_logits_twice_and_writes_them_once():
    """6 bytes per bf16 logit; the operations in torch move 44 (tests/planner/cost/test_loss_and_sums.py)."""
    kernels = launched(90, torch.bfloat16)
    moved = 0
    for name in ("cross_entropy_sums", "cross_entropy_gradient_"):
        # blocks of bf16 numbers; all others are single numbers of a token
        blocks = re.findall(r"tt\.(?:load|store) .*tensor<\d+x!tt\.ptr<bf16>>", kernels[name].asm["ttir"])
        moved += 2 * len(blocks)
    assert moved == 6


def test_offsets_into_tensors_have_64_bits():
    """Logits of a chunk may be more than 2^31: a row times their number, computed in 32 bits, would wrap around."""
    for name, kernel in launched(90, torch.bfloat16).items():
        ttir = kernel.asm["ttir"]
        blocks = re.findall(r"tt\.addptr .* : tensor<[\dx]+x!tt\.ptr<\w+>>, tensor<[\dx]+xi64>", ttir)
        rows = re.findall(r"tt\.addptr .* : !tt\.ptr<\w+>, i64", ttir)
        assert blocks or rows, name


# A width of each dtype, loss with and without z-loss and in several blocks, NaN, empty tensors.
SHORT = (
    "float64[ and (-7-2-torch.b or -33-2-torch.f or [z-loss-16- or plain-1037-torch.b) "
    "or spreads and nan-torch.f or empty or first_equal"
)
ALL = "not threads and not machine and not long_row"  # threads are those of C, and one row is a million elements


@pytest.mark.parametrize("chosen", [SHORT, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_the_interpreter_passes_the_tests_of_the_operators(chosen):
    files = [f"tests/model/kernels/{name}.py" for name in ("test_operations", "test_loss_kernels")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.model.interpreted", *files, "-k", chosen],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 20


@pytest.mark.parametrize(("capability", "name"), [((9, 0), "fused Triton kernels (Triton 3"), ((7, 0), "torch")])
def test_gpus_with_bf16_compute_with_them(capability, name):
    """The name is saved in checkpoints: other kernels give other bits."""
    with simulated_backend(backend_of("cuda").of_chip("nvidia", capability)):
        assert are_used_on(CPU) == (name != "torch")
        with patch.object(Backend, "describe", lambda *_: "a GPU"):
            assert describe_kernels(CPU).startswith(name)


@pytest.mark.parametrize("missing", ["Triton is not installed", "no C compiler found"])
def test_without_triton_or_its_compiler_torch_computes_and_the_reason_is_logged(missing, caplog, monkeypatch):
    backend = backend_of("cuda").of_chip("nvidia", (9, 0))
    if "Triton" in missing:
        monkeypatch.setitem(sys.modules, "triton", None)
    else:
        monkeypatch.setenv("CC", "no-such-compiler")
        backend.compiler = Backend.compiler  # of a machine that has the GPU
    with simulated_backend(backend):
        assert not are_used_on(CPU) and not are_used_on(CPU)
        with fake_rank(0, 2):
            assert are_used_on(CPU), "a rehearsal launches nothing"
    assert [record.getMessage().endswith(missing) for record in caplog.records] == [True], "said once"
