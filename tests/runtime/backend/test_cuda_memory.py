"""CUDA without a device: how the allocator is set, what it says of itself, and host memory registered in pieces."""

import os
import shutil
import sysconfig
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch

from hlat.optim import adamw_reference
from hlat.optim.adamw import kernel_for
from hlat.runtime.backend import cuda
from hlat.runtime.backend.base import AllocatorUse, Compiler
from hlat.runtime.backend.device import restored_settings
from hlat.runtime.backend.table import backend_of

CUDA = torch.device("cuda", 0)


NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize(
    ("chosen", "vendor"), [("", "nvidia"), (NAMES[0], "nvidia"), (NAMES[1], "nvidia"), ("", "amd")]
)
def test_segments_are_expandable_unless_the_user_configures_the_allocator(chosen, vendor, monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    if chosen:
        monkeypatch.setenv(chosen, "max_split_size_mb:512")
    monkeypatch.setattr(cuda, "gpu_vendor", lambda: vendor)
    before = dict(os.environ)
    with restored_settings():
        backend_of("cuda").configure_process()
        added = dict(os.environ.items() - before.items())
    assert added == ({} if chosen or vendor == "amd" else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_the_allocator_says_what_it_reserved(monkeypatch):
    statistics = {"reserved_bytes.all.peak": 7 << 30, "num_alloc_retries": 2, "allocated_bytes.all.peak": 5 << 30}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: statistics)
    assert backend_of(CUDA).allocator_use(CUDA) == AllocatorUse(7 << 30, 2)
    assert backend_of("cpu").allocator_use(torch.device("cpu")) is None


class Driver:
    """Registered host memory, which refuses pieces from a number on."""

    def __init__(self, refuses: int) -> None:
        self.refuses, self.registered = refuses, {}
        self.calls = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls += 1
        if self.calls > self.refuses:
            return 2
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.mark.parametrize(("size", "pieces"), [(4096, 1), (2 * 4096, 2), (2 * 4096 + 1, 3)])
def test_host_memory_is_registered_in_pieces_that_cover_it(size, pieces, monkeypatch):
    driver, memory = Driver(refuses=9), torch.zeros(size, dtype=torch.uint8)
    monkeypatch.setattr(cuda, "_PINNED_AT_ONCE", 4096)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    assert backend_of(CUDA).pin_memory(memory, CUDA)
    assert len(driver.registered) == pieces and max(driver.registered.values()) == 4096
    covered = sorted(driver.registered.items())
    assert covered[0][0] == memory.data_ptr() and sum(driver.registered.values()) == size
    assert all(first + length == second for (first, length), (second, _) in pairwise(covered))
    backend_of(CUDA).unpin_memory(memory, CUDA)
    assert driver.registered == {}


def test_memory_of_which_a_piece_is_refused_is_not_registered_at_all(monkeypatch):
    """A copy must not cross registered and other memory."""
    driver = Driver(refuses=2)
    monkeypatch.setattr(cuda, "_PINNED_AT_ONCE", 4096)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    assert not backend_of(CUDA).pin_memory(torch.zeros(5 * 4096, dtype=torch.uint8), CUDA)
    assert driver.registered == {} and driver.calls == 3


@pytest.mark.parametrize(
    ("programs", "headers", "available"),
    [(("gcc",), True, True), (("clang",), True, True), (("cc",), True, False), (("gcc",), False, False)],
)
def test_triton_needs_a_compiler_that_it_searches_and_pythons_headers(
    programs, headers, available, monkeypatch, tmp_path
):
    """As triton/runtime/build.py and the launcher's first include say."""
    compiler = cuda.BACKEND.compiler
    if headers:
        (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name in programs else None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert compiler is not None and compiler.is_available() is available


def test_bf16_weights_are_updated_without_triton_where_its_launchers_cannot_be_compiled(monkeypatch, caplog):
    monkeypatch.setattr(type(backend_of("cuda")), "compile_obstacle", lambda self, device: "")
    monkeypatch.setattr(Compiler, "is_available", lambda self: False)
    assert kernel_for(CUDA) is adamw_reference.update
    assert "python3-dev" in caplog.text
