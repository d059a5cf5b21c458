"""Environment of the steps: carried wheels unpacked, folders that can be written, a fake nvidia-smi for a CPU.

wheels --unpacked, without pip--> folder on PYTHONPATH;  the first combination that can import hlat is used
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
KIT = Path(__file__).resolve().parents[1]
_IMPORT_SECONDS = 60.0

# The numbers are not those of any GPU; the GPU is not in the catalog.
_FAKE_SMI = """#!/bin/sh
case "$*" in
  *memory.used*) echo 1024 ;;
  *compute-apps*) echo "1, 512, python" ;;
  *query-gpu=name,*) echo "Fake GPU, 0, 81559, 700.00, 1980, 2619, Disabled, Enabled, Enabled, Default, 5, 16" ;;
  *) echo "nvidia-smi of the kit's trial on a CPU" ;;
esac
"""


def working_folder(wanted: str | None) -> Path:
    """Make the folder for everything but results: the wanted one, or the first place that can be written."""
    places = [wanted] if wanted else [tempfile.gettempdir(), "/dev/shm", "."]
    for place in places:
        folder = Path(place) if wanted else Path(place) / f"hlat-first-contact-{os.getuid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (folder / ".written").write_text("")
            return folder.resolve()
        except OSError as error:
            print(f"{folder}: cannot be written: {error}", flush=True)
    raise SystemExit("no folder can be written; name one with --work")


def results_folder(wanted: str, work: Path) -> Path:
    """Make the folder of the results; where it cannot be written, one in the working folder, and say so."""
    folder = Path(wanted).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log.txt").touch()
    except OSError as error:
        print(f"{folder}: cannot be written: {error}; results are in {work / 'out'}", flush=True)
        folder = work / "out"
        folder.mkdir(exist_ok=True)
    return folder


def unpack(wheels: Path, site: Path) -> list[str]:
    """Unpack all wheels of a folder; return one line for each, with what went wrong if something did."""
    lines = []
    for wheel in sorted(wheels.glob("*.whl")):
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
            lines.append(wheel.name)
        except (OSError, zipfile.BadZipFile) as error:
            lines.append(f"{wheel.name}: {error}")
    for folder in site.glob("*.data/*lib"):  # files of the wheel that are for site-packages
        for path in folder.iterdir():
            if not (site / path.name).exists():
                path.rename(site / path.name)
    return lines


def variables(work: Path, site: Path, on_cpu: bool) -> dict[str, str]:
    """Return the environment variables of all steps; PYTHONPATH is that of this process."""
    found = dict(os.environ)
    for name in ("HLAT_BENCHMARK_RESULTS", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        found.pop(name, None)
    found |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "NO_COLOR": "1"}
    found |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TMPDIR": str(work / "tmp")}
    (work / "tmp").mkdir(exist_ok=True)
    if not os.access(found.get("HOME", ""), os.W_OK):
        found["HOME"] = str(work)  # caches of Triton, NVIDIA's compiler and others
    if on_cpu:
        (work / "bin").mkdir(exist_ok=True)
        fake = work / "bin" / "nvidia-smi"
        fake.write_text(_FAKE_SMI)
        fake.chmod(0o700)
        found["PATH"] = f"{work / 'bin'}{os.pathsep}{found.get('PATH', os.defpath)}"
        found["OMP_NUM_THREADS"] = found.get("OMP_NUM_THREADS", "1")
    else:
        # The folder of the driver's tools is not on the path of every shell.
        found["PATH"] = os.pathsep.join([found.get("PATH", os.defpath), "/usr/local/nvidia/bin", "/usr/local/cuda/bin"])
    return found


def python_path(site: Path, environment: dict[str, str]) -> tuple[str, str]:
    """Return the first PYTHONPATH with which hlat can be imported, and why those before it did not do.

    The carried wheels come first, then the source beside this file, then what this Python has installed. If none
    works, the first one is returned: then every step says why.
    """
    carried, source = [str(site), str(KIT)], [str(ROOT / "src"), str(KIT)]
    given = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
    choices = [os.pathsep.join(each + given) for each in (carried, [*carried, source[0]], source, [str(KIT)])]
    if not any(site.glob("hlat*")):
        choices = choices[3:] + choices[1:3]
    failures = []
    for choice in choices:
        command = [sys.executable, "-c", "import hlat.config.load, hlat; print(hlat.__version__, hlat.__file__)"]
        try:
            done = subprocess.run(
                command,
                env=environment | {"PYTHONPATH": choice},
                cwd=KIT,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_IMPORT_SECONDS,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            failures.append(f"{choice}: {error}")
            continue
        if done.returncode == 0:
            return choice, "\n".join(failures)
        failures.append(f"{choice}: {done.stderr.strip()[-800:]}")
    return choices[0], "\n".join(failures)
