"""Device queries report the values of this process."""

import subprocess
import sys

import pytest
import torch

from hlat.runtime.backend import backend_of, peak_memory_bytes, simulated_backend, to_device


def test_peak_memory_does_not_include_the_launchers() -> None:
    held = torch.ones(300 << 20, dtype=torch.uint8)
    program = (
        "import torch; from hlat.runtime.backend import peak_memory_bytes; "
        "print(peak_memory_bytes(torch.device('cpu')))"
    )
    small = int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    assert small + held.nbytes // 2 < peak_memory_bytes(torch.device("cpu"))


@pytest.mark.parametrize(("device_type", "waits"), [("cuda", False), ("neuron", True), ("cpu", True)])
def test_the_host_waits_for_a_copy_of_memory_that_a_device_may_read_later(device_type, waits, monkeypatch) -> None:
    """Temporary tensors are copied: their memory has other contents soon."""
    asked: list[bool] = []
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, non_blocking: asked.append(non_blocking))
    with simulated_backend(backend_of(device_type)):
        to_device(torch.ones(2), torch.device("cpu"))
    assert asked == [not waits]
