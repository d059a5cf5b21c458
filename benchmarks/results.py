"""Records of measurements: every benchmark writes one, and docs/notebook/results.md is the table of them.

    benchmark --Recorder--> benchmarks/results/NAME.json --this script--> docs/notebook/results.md

A record is one run of one script on one machine, with the claims that it measured. ``benchmarks/results.schema.json``
documents its fields. HLAT_BENCHMARK_RESULTS names another folder for the records, for example for a trial run at a
small size that should not replace a real measurement.

    python benchmarks/results.py            check all records; list what is wrong
    python benchmarks/results.py --write    check them, then write results.md and results.schema.json
"""

import argparse
import json
import os
import platform
import re
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "results"
SCHEMA = ROOT / "benchmarks" / "results.schema.json"
NOTEBOOK = ROOT / "docs" / "notebook"
TABLE = NOTEBOOK / "results.md"
FOLDER_VARIABLE = "HLAT_BENCHMARK_RESULTS"
TRANSCRIBED = "transcribed from the notebook"
SHOWN = 3  # claims of a record in the table
BUSY_STEAL, BUSY_OTHERS = 0.02, 0.05

Number = Annotated[float, Field(allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Quantity(_Strict):
    """A measured number: the median of its rounds and their range."""

    value: Number = Field(
        description="the median of the rounds; the number itself if there was one round or it is a count"
    )
    low: Number | None = Field(None, description="smallest round; null if unknown or if there was one round")
    high: Number | None = Field(None, description="largest round; null if unknown or if there was one round")
    rounds: int | None = Field(None, ge=1, description="number of rounds; null if unknown")


class Peer(Quantity):
    """The same quantity measured of another program, published elsewhere, or given by a formula."""

    name: str = Field(min_length=1, description="program with version, publication or formula that is compared with")


class Claim(_Strict):
    """One number that a benchmark measured."""

    claim: str = Field(min_length=8, description="what was measured, understandable without the script")
    unit: str = Field(description="unit of the number and of the peer's; '1' for a ratio or a count without a unit")
    ours: Quantity = Field(description="the number measured of hlat")
    peer: Peer | None = Field(None, description="what it is compared with; null if nothing")
    note: str | None = Field(None, description="goal, condition or caveat")


class Machine(_Strict):
    """The kind of machine, and how busy it was."""

    cpu: str | None = Field(description="CPU model; null if unknown")
    cores: int | None = Field(ge=1, description="CPU cores that the benchmark could use; null if unknown")
    bf16: bool | None = Field(
        description="the CPU has bf16 instructions (AVX-512-BF16, AMX, Arm BF16); null if unknown"
    )
    accelerator: str | None = Field(None, description="accelerator that was used; null if none")
    load: Literal["quiet", "busy"] | None = Field(
        description=f"busy: more than {BUSY_STEAL:.0%} of the time was stolen by the host of the virtual machine, or "
        f"other programs used more than {BUSY_OTHERS:.0%} of all cores; null if unknown"
    )
    steal: float | None = Field(None, ge=0, le=1, description="share of all processor time stolen by the host")
    others: float | None = Field(None, ge=0, description="cores used by other programs, on average")


class Record(_Strict):
    """One run of a benchmark."""

    script: str = Field(description="path of the script in the repository")
    command: str | None = Field(description="command line, without folders of the machine; null if unknown")
    source: Literal["measured by the script", "transcribed from the notebook"] = Field(
        description="transcribed: copied by hand from docs/notebook, whose text remains the source"
    )
    page: str = Field(description="page of docs/notebook that describes the measurement")
    date: date
    commit: str | None = Field(description="git describe --always --dirty at the time; null if unknown")
    versions: dict[str, str | None] = Field(description="versions by package: torch, hlat, and those of peers")
    machine: Machine
    claims: list[Claim] = Field(min_length=1)


class Recorder:
    """Collects the claims of one run of a benchmark, then writes its record.

    Create it before the measurement: the load of the machine is that between creation and ``write``.

    Args:
        script: ``__file__`` of the benchmark.
        page: page of docs/notebook about it, for example "speed.md".
        packages: packages besides torch and hlat whose versions are recorded.
        device: device that is measured; an accelerator is recorded by its name.
    """

    def __init__(self, script: str, page: str, *, packages: Sequence[str] = (), device: str = "cpu") -> None:
        self._script, self._page, self._device = Path(script).resolve(), page, device
        self._packages = ("torch", "hlat", *packages)
        self._claims: list[Claim] = []
        self._begin = _processor_time()

    def add(
        self,
        claim: str,
        unit: str,
        values: float | Sequence[float],
        *,
        peer: str | None = None,
        peer_values: float | Sequence[float] = (),
        note: str | None = None,
    ) -> None:
        """Add a number, or the rounds of which the median is the number, and that of a peer."""
        theirs = None
        if peer is not None:
            theirs = Peer(name=peer, **quantity(peer_values).model_dump())
        self._claims.append(Claim(claim=claim, unit=unit, ours=quantity(values), peer=theirs, note=note))

    def write(self, name: str | None = None) -> Path:
        """Write ``NAME.json``, named after the script if no name is given, and print where it is.

        Raises:
            pydantic.ValidationError: the record breaks the schema, for example because it has no claims.
        """
        record = Record(
            script=str(self._script.relative_to(ROOT)),
            command=_command(self._script),
            source="measured by the script",
            page=self._page,
            date=date.today(),
            commit=_commit(),
            versions={package: _version(package) for package in self._packages},
            machine=_machine(self._begin, self._device),
            claims=self._claims,
        )
        folder = Path(os.environ.get(FOLDER_VARIABLE) or RECORDS)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{name or self._script.stem}.json"
        file.with_suffix(".tmp").write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
        file.with_suffix(".tmp").rename(file)
        print(f"\nrecord: {file}")
        return file


def quantity(values: float | Sequence[float]) -> Quantity:
    """Median and range of some rounds; a single number stands for itself."""
    rounds = [values] if isinstance(values, int | float) else list(values)
    spread = {"low": min(rounds), "high": max(rounds), "rounds": len(rounds)} if len(rounds) > 1 else {}
    return Quantity(value=statistics.median(rounds), **spread)


def load_records(folder: Path = RECORDS) -> dict[str, Record]:
    """All records of a folder by name.

    Raises:
        ValueError: a file breaks the schema, or names a page or script that does not exist; the message names
            the file.
    """
    records = {}
    for file in sorted(folder.glob("*.json")):
        try:
            records[file.stem] = Record.model_validate_json(file.read_bytes())
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
    for name, record in records.items():
        if not (NOTEBOOK / record.page).is_file():
            raise ValueError(f"{name}.json: page is no page of docs/notebook: {record.page}")
        if not (ROOT / record.script).exists():
            raise ValueError(f"{name}.json: script is not in the repository: {record.script}")
    return records


def schema() -> str:
    """JSON schema of a record."""
    return json.dumps(Record.model_json_schema(), indent=1) + "\n"


def table(records: dict[str, Record]) -> str:
    """Markdown of docs/notebook/results.md: a row per record with its first claims, by page of the notebook."""
    lines = [
        "# Results",
        "",
        "Generated from `benchmarks/results/*.json` by `python benchmarks/results.py --write`; do not edit. Each row",
        f"is one record: its first {SHOWN} claims, how many more its file has, and the script that measured them. A",
        "number is the median of its rounds, with their range in brackets. Busy: other programs, or the host of a",
        "virtual machine, used the processor at the same time.",
    ]
    pages: defaultdict[str, list[tuple[str, Record]]] = defaultdict(list)
    copied: defaultdict[str, list[str]] = defaultdict(list)  # out of a page, by hand: it says no more than the page
    for name, record in records.items():
        if record.source == TRANSCRIBED:
            copied[record.page].append(_link(name))
        else:
            pages[record.page].append((name, record))
    for page in sorted(pages):
        title = (NOTEBOOK / page).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines += ["", f"## [{title}]({page})", "", "| record, script | claims | machine, date |", "|---|---|---|"]
        lines += [_row(*item) for item in sorted(pages[page], key=lambda item: (-item[1].date.toordinal(), item[0]))]
    lines += ["", "## Transcribed", "", "Copied by hand from a page, measured before benchmarks wrote records.", ""]
    lines += ["| page | records |", "|---|---|"]
    lines += [f"| [{page}]({page}) | {', '.join(links)} |" for page, links in sorted(copied.items())]
    return "\n".join(lines) + "\n"


def _row(name: str, record: Record) -> str:
    script = f"[{Path(record.script).name}](../../{record.script})"
    shown = [_claim(claim) for claim in record.claims[:SHOWN]]
    more = len(record.claims) - len(shown)
    shown += [f"{more} more"] if more else []
    cells = (f"{_link(name)}, {script}", "<br>".join(shown), f"{_show_machine(record)}, {record.date}")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _link(name: str) -> str:
    return f"[{name}](../../benchmarks/results/{name}.json)"


def _claim(claim: Claim) -> str:
    peer = f"; {claim.peer.name}: {_show(claim.peer, claim.unit)}" if claim.peer else ""
    return f"{claim.claim}: **{_show(claim.ours, claim.unit)}**{peer}"


def _show(quantity: Quantity, unit: str) -> str:
    spread = ""
    if quantity.low is not None and quantity.high is not None:
        spread = f" ({_digits(quantity.low)} to {_digits(quantity.high)})"
    elif quantity.high is not None:
        spread = f" (at most {_digits(quantity.high)})"
    return f"{_digits(quantity.value)}{'' if unit == '1' else ' ' + unit}{spread}"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 or value == int(value) else f"{value:,.5g}"


def _show_machine(record: Record) -> str:
    machine = record.machine
    if machine.cpu is None and machine.load is None:
        return "unknown"
    words = [machine.cpu or "unknown CPU", f"{machine.cores or 'unknown number of'} cores"]
    words += [{True: "bf16", False: "no bf16", None: "bf16 unknown"}[machine.bf16]]
    words += [machine.accelerator] if machine.accelerator else []
    return ", ".join([*words, machine.load or "load unknown"])


def _command(script: Path) -> str:
    """The command line; of an absolute path only the last component, without the folders of this machine."""
    words = [re.sub(r"(^|=)/.*/", r"\1", word) for word in sys.argv[1:]]
    return shlex.join(["python", str(script.relative_to(ROOT)), *words])


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine(begin: tuple[float, float, float, float] | None, device: str) -> Machine:
    steal = others = load = None
    end = _processor_time()
    if begin is not None and end is not None:
        wall, used, stolen, ours = (after - before for after, before in zip(end, begin, strict=True))
        wall, every = max(wall, 1e-9), os.cpu_count() or 1
        steal, others = min(1.0, max(0.0, stolen / wall / every)), max(0.0, (used - ours) / wall)
        load = "busy" if steal > BUSY_STEAL or others > BUSY_OTHERS * every else "quiet"
        steal, others = round(steal, 4), round(others, 3)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpu, bf16 = _cpu()
    return Machine(
        cpu=cpu, cores=cores, bf16=bf16, accelerator=_accelerator(device), load=load, steal=steal, others=others
    )


def _cpu() -> tuple[str | None, bool | None]:
    """Model of the CPU, and True if it has bf16 instructions."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or None, None
    fields = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    known = {name.strip().lower(): value.strip() for name, value in fields.items()}
    flags = known.get("flags", known.get("features", "")).split()
    return known.get("model name"), bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags)) if flags else None


def _accelerator(device: str) -> str | None:
    if device.startswith("cpu"):
        return None
    torch = sys.modules.get("torch")
    if device.startswith("cuda") and torch is not None:
        return str(torch.cuda.get_device_name(device))
    return device


def _processor_time() -> tuple[float, float, float, float] | None:
    """Seconds: of the clock; of processor time used by all programs; stolen by the host; used by this run.

    None where there is no /proc/stat. This run is this process with the child processes that it has waited for.
    """
    try:
        words = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, stolen = (int(word) / os.sysconf("SC_CLK_TCK") for word in words[:8])
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ours = sum(usage.ru_utime + usage.ru_stime for usage in spent)
    return time.monotonic(), user + nice + system + irq + softirq, stolen, ours


def main() -> None:
    """Check all records, and write what is generated from them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/notebook/results.md and the schema")
    write = parser.parse_args().write
    try:
        records = load_records()
    except ValueError as error:
        sys.exit(str(error))
    print(f"{len(records)} records, {sum(len(record.claims) for record in records.values())} claims")
    if write:
        TABLE.write_text(table(records), encoding="utf-8")
        SCHEMA.write_text(schema(), encoding="utf-8")


if __name__ == "__main__":
    main()
