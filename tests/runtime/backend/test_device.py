"""Device queries report the values of this process."""

import subprocess
import sys

import torch

from hlat.runtime.backend.device import peak_memory_bytes


def test_peak_memory_does_not_include_the_launchers() -> None:
    held = torch.ones(300 << 20, dtype=torch.uint8)
    program = (
        "import torch; from hlat.runtime.backend.device import peak_memory_bytes; "
        "print(peak_memory_bytes(torch.device('cpu')))"
    )
    small = int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    assert small + held.nbytes // 2 < peak_memory_bytes(torch.device("cpu"))
