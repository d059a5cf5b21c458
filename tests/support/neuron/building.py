"""Build the test device's library with the machine's compiler, once per version of torch and of the source.

device.cpp --g++--> <cache>/hlat-stand-in/<torch>-<hash>/device.so, and the entry points of a package

The folder has the metadata of an installed package too: with it on PYTHONPATH, ``import torch`` loads the device, and
``torch.compile(backend="neuron")`` finds its compiler, through the entry points that torch-neuronx has.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("device.cpp")
_FLAGS = ("-std=c++20", "-O1", "-w", "-fPIC", "-shared")  # the kernels are torch's: nothing to gain from more
_METADATA = """Metadata-Version: 2.1
Name: hlat-stand-in
Version: 0
"""
_ENTRY_POINTS = """[torch.backends]
hlat_stand_in = tests.support.neuron.device_module:load

[torch_dynamo_backends]
neuron = tests.support.neuron.compiling:compile_graph
"""


def skip_reason() -> str:
    """Return the reason why this machine cannot build the device; empty if it can."""
    return "" if shutil.which("g++") else "the test device needs g++, and this machine has none"


def build() -> Path:
    """Build the library unless it is there.

    Returns:
        The folder with ``device.so`` and the metadata of the package.
    """
    root = Path(torch.__file__).parent
    command = ["g++", *_FLAGS, "-isystem", str(root / "include")]
    command += ["-isystem", str(root / "include" / "torch" / "csrc" / "api" / "include")]
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(command).encode() + _ENTRY_POINTS.encode()).hexdigest()[:16]
    folder = _cache() / f"{torch.__version__}-{key}"
    if (folder / "device.so").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes need it at once: one of them compiles
        if not (folder / "device.so").is_file():
            _compile(command, folder)
    return folder


def _compile(command: list[str], folder: Path) -> None:
    lib = Path(torch.__file__).parent / "lib"
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        library, metadata = Path(made, "device.so"), Path(made, "hlat_stand_in-0.dist-info")
        libraries = [f"-L{lib}", "-lc10", "-ltorch_cpu", "-ltorch"]
        subprocess.run([*command, str(SOURCE), "-o", str(library), *libraries], check=True)
        metadata.mkdir()
        (metadata / "METADATA").write_text(_METADATA)
        (metadata / "entry_points.txt").write_text(_ENTRY_POINTS)
        Path(made).chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        Path(made).rename(folder)
        Path(made).mkdir()  # the context removes it


def _cache() -> Path:
    """A folder of this user's, which others cannot write: a library is loaded from it."""
    home = os.environ.get("XDG_CACHE_HOME") or (Path.home() / ".cache")
    return Path(home) / "hlat-stand-in"
