"""Size and time of an installation in a clean environment: base, dev and each extra, by pip and by uv.

    python benchmarks/install_sizes.py [--tools uv,pip] [--extras ,dev,hf,...] [--python python3.12]

Each installation is one of this checkout with ``constraints.txt``, in a virtual environment of its own. The size is
that of the files in its site-packages, without pip and setuptools and without compiled bytecode, which pip writes and
uv does not; of an extra it is the difference to the base. pip has no cache; uv has an empty one for its first
installation, the base, and reuses it for the others. Indexes are those that pip and uv are configured with
(PIP_INDEX_URL, UV_DEFAULT_INDEX, UV_FIND_LINKS, ...): time depends on how near they are, size only on which build of
torch they have.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

from results import ROOT, Recorder

OF_THE_INSTALLER = ("pip", "setuptools", "_distutils_hack", "pkg_resources")


@dataclass(frozen=True)
class Installed:
    """One installation.

    Attributes:
        size: bytes of the files in site-packages.
        packages: number of packages.
        wall: seconds from start to end.
        processor: seconds of user and system time.
        torch: version of torch.
    """

    size: int
    packages: int
    wall: float
    processor: float
    torch: str


def install(tool: str, extra: str, python: str, work: Path) -> Installed:
    """Install the checkout with an extra into a new environment below ``work``."""
    place = work / f"{tool}-{extra or 'base'}"
    target = f"{ROOT}[{extra}]" if extra else str(ROOT)
    constraints = ["--constraint", str(ROOT / "constraints.txt"), target]
    inside = str(place / "bin/python")
    if tool == "pip":
        commands = [[python, "-m", "venv", str(place)], [inside, "-m", "pip", "install", "-q", "--no-cache-dir"]]
        commands[1] += constraints
    else:
        commands = [["uv", "venv", "-q", "--python", python, str(place)]]
        commands += [["uv", "pip", "install", "-q", "--python", inside, *constraints]]
    environment = {**os.environ, "UV_CACHE_DIR": str(work / "uv-cache")}
    environment.pop("PYTHONPATH", None)
    began, before = time.perf_counter(), os.times()
    for command in commands:
        subprocess.run(command, check=True, env=environment, cwd=work)
    after, wall = os.times(), time.perf_counter() - began
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    (packages,) = place.glob("lib/python*/site-packages")
    query = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    done = subprocess.run([inside, "-c", query], check=True, capture_output=True, text=True, env=environment, cwd=work)
    versions = {name: of for name, of in json.loads(done.stdout).items() if name not in OF_THE_INSTALLER}
    return Installed(size(packages), len(versions), wall, processor, versions["torch"])


def size(packages: Path) -> int:
    """Bytes of the files of a site-packages folder, without the installer's own and bytecode."""
    files = (file for file in packages.rglob("*") if file.suffix != ".pyc" and not file.is_symlink() and file.is_file())
    kept = (file for file in files if not file.relative_to(packages).parts[0].startswith(OF_THE_INSTALLER))
    return sum(file.stat().st_size for file in kept)


def main() -> None:
    """Print and record the table."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default="uv,pip", help="pip, uv or both")
    parser.add_argument("--extras", default=",".join(["", *extras]), help="extras; an empty name is the base")
    parser.add_argument("--python", default=sys.executable, help="Python of the environments")
    chosen = parser.parse_args()
    record = Recorder(__file__, "install.md")
    print(f"{'tool':4} {'extra':14} {'MB':>7} {'more MB':>7} {'packages':>8} {'wall s':>7} {'CPU s':>6}  torch")
    for tool in chosen.tools.split(","):
        with tempfile.TemporaryDirectory() as work:
            base = None
            for extra in chosen.extras.split(","):
                try:
                    one = install(tool, extra, chosen.python, Path(work))
                except subprocess.CalledProcessError as error:
                    print(f"{tool:4} {extra or 'base':14} failed: exit code {error.returncode}", flush=True)
                    continue
                base = base or one
                more = one.size - base.size
                head = f"{tool:4} {extra or 'base':14} {one.size / 1e6:7.0f} {more / 1e6:7.0f} {one.packages:8}"
                print(f"{head} {one.wall:7.0f} {one.processor:6.0f}  {one.torch}", flush=True)
                name = f"hlat[{extra}]" if extra else "hlat"
                note = f"{one.packages} packages, torch {one.torch}"
                record.add(f"size of {name} installed by {tool}", "MB", one.size / 1e6, note=note)
                record.add(f"processor time of installing {name} by {tool}", "s", one.processor, note=note)
    record.write()


if __name__ == "__main__":
    main()
