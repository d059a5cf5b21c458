"""Questions to nvidia-smi. It is only asked: nothing of the GPU is changed. Whatever it prints, no question fails."""

import re
import subprocess

_LIMIT = 15.0  # seconds; the first call may load the driver
FACTS = (
    "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem,mig.mode.current,ecc.mode.current,"
    "persistence_mode,compute_mode,pcie.link.gen.max,pcie.link.width.max"
)


def ask(*arguments: str) -> str:
    """Return the output of nvidia-smi; on failure a text that begins with "failed"."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, errors="replace", timeout=_LIMIT, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"failed: {error}"
    text = done.stdout.strip()
    return text if done.returncode == 0 else f"failed with {done.returncode}: {text} {done.stderr.strip()}"


def facts() -> dict[str, str]:
    """Return what nvidia-smi says of the first GPU, by the name of the field.

    All fields are asked for at once. If a version refuses one of them, the first ones are asked for alone, and those
    that it does not know are left out.
    """
    names = FACTS.split(",")
    line = _first_line(f"--query-gpu={FACTS}")
    values = [value.strip() for value in line.split(",")]
    if len(values) == len(names):
        return dict(zip(names, values, strict=True))
    found = {name: _first_line(f"--query-gpu={name}") for name in names[:4]}
    return {name: value for name, value in found.items() if value}


def used_mib() -> float | None:
    """Return the memory in use on the first GPU in MiB; None if nvidia-smi does not say."""
    number = re.search(r"\d+(\.\d+)?", _first_line("--query-gpu=memory.used"))
    return None if number is None else float(number[0])


def users() -> list[str]:
    """Return the processes that nvidia-smi lists as users of the GPU, one line each."""
    text = ask("--query-compute-apps=pid,used_memory,name", "--format=csv,noheader,nounits")
    return [] if text.startswith("failed") else text.splitlines()[:20]


def _first_line(query: str) -> str:
    """Return the first line of an answer in CSV; empty if there is none."""
    text = ask(query, "--format=csv,noheader,nounits")
    return "" if text.startswith("failed") else next(iter(text.splitlines()), "")
