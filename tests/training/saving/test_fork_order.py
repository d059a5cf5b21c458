"""The saver process is forked before the process asks for a device, which initialises a driver: no fork survives it."""

import os
import subprocess
import sys
from pathlib import Path

SHIM = Path(__file__).parents[2] / "support/runtime/driver_shim.c"
ASK = """
import ctypes, sys, torch
from hlat.config.load import parse_recipe
from hlat.runtime.errors import LaunchError
from hlat.training import run

if torch.version.cuda is None:  # builds for CUDA call the shim themselves
    original, shim = torch.accelerator.current_accelerator, ctypes.CDLL(None)
    def asking(check_available=False):
        if check_available:
            shim.cudaGetDeviceCount(ctypes.byref(ctypes.c_int()))
        return original(check_available)
    torch.accelerator.current_accelerator = asking
recipe = {
    "run": {"dir": sys.argv[1], "device": "neuron", "deterministic": False},
    "model": {"vocab_size": 64, "layers": 1, "hidden_size": 32, "intermediate_size": 96, "heads": 4},
    "data": {"path": "none", "sequence_length": 16, "tokenizer": {"train": "char"}},
    "training": {"steps": 9},
    "checkpoint": {"every_steps": 5},
}
try:
    run(parse_recipe(recipe, world=1))
except LaunchError as error:
    assert "no such device here" in str(error), error
"""


def test_the_saver_is_forked_before_the_driver_is_asked(tmp_path: Path) -> None:
    shim, log = tmp_path / "shim.so", tmp_path / "log"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", shim, SHIM], check=True)
    subprocess.run(
        [sys.executable, "-c", ASK, tmp_path / "run"],
        env={**os.environ, "LD_PRELOAD": str(shim), "SHIM_LOG": str(log)},
        check=True,
    )
    events = log.read_text().split()
    assert events[0] == "fork" and "device" in events, events
