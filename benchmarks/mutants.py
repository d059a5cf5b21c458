"""Mutation testing: one small change of the source at a time, and whether a test of the default suite notices it.

    draw N mutants with a seed -> each: put into a copy of the repository, tests about that file -> killed, survived

    python benchmarks/mutants.py --seed 15 --count 100 --jobs 2     continue where it was stopped
    python benchmarks/mutants.py --table                            the results so far, and their record
    python benchmarks/mutants.py --retry survived --wide            run survivors again, with all tests of their room
    python benchmarks/mutants.py --show ID                          the mutant as a diff
    python benchmarks/mutants.py --judge ID "reason"                note that a survivor computes the same as before

The mutants are those of the literature (Jia and Harman 2011, "An analysis and survey of the development of mutation
testing", table 2): constants, comparisons, arithmetic, conditions, statements left out, arguments swapped, no result.
Messages, docstrings, types, assertions and raised errors are not changed: they are not part of what is computed.

The tests about the file run until one fails; with --wide, those of its room after them. Timeouts are counted apart: a
mutant that hangs is noticed, but so is a busy machine; look at each. One call at a time: the file is written as a
whole.

benchmarks/raw/mutants.json has the state of every mutant, from which an interrupted call continues and which the
options above change. It is raw data and has a format of its own; the record with the counts is
benchmarks/results/mutants.json.
"""

import argparse
import difflib
import json
import math
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mutant_places import FILES, ROOT, SOURCE, draw, faulty
from mutant_trials import Copy, git
from results import Recorder

STATES = ROOT / "benchmarks" / "raw" / "mutants.json"


class Book:
    """State of all drawn mutants; on disk after every change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.content = json.loads(path.read_text()) if path.exists() else {}
        self._lock = threading.Lock()

    def begin(self, seed: int, count: int, rooms: list[str]) -> None:
        """Draw mutants of rooms, or continue with those drawn; more are drawn after those that there are."""
        if self.content and self.content["seed"] != seed:
            sys.exit(f"{self._path} holds a draw with seed {self.content['seed']}: give that, or another --states")
        known = {mutant["id"] for mutant in self.content.get("mutants", [])}
        if len(known) < count:
            commit = git("rev-parse", "--short=10", "HEAD").strip()
            new = [asdict(mutant) for mutant in draw(seed, count, rooms) if mutant.id not in known]
            drawn = [mutant | {"commit": commit, "status": None} for mutant in new[: count - len(known)]]
            self.content = {"seed": seed, "mutants": [*self.content.get("mutants", []), *drawn]}
            self.save()

    def of(self, id: str) -> dict[str, Any]:
        """State of a mutant."""
        found = [mutant for mutant in self.content["mutants"] if mutant["id"] == id]
        return found[0] if found else sys.exit(f"{id}: not among those that were drawn")

    def note(self, record: dict[str, Any], **fields: Any) -> None:
        """Add fields to the state of a mutant."""
        with self._lock:
            record.update(fields)
            self.save()

    def save(self) -> None:
        """Write everything, under a temporary name first."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        making = self._path.with_suffix(".tmp")
        making.write_text(json.dumps(self.content, indent=1) + "\n")
        making.rename(self._path)


def table(book: Book) -> str:
    """Markdown: a row per room, and the survivors."""
    lines = ["| room | tried | killed | timed out | equivalent | survived |", "|---|---|---|---|---|---|"]
    tried = [mutant for mutant in book.content["mutants"] if mutant["status"] not in (None, "stale")]
    for room in (*FILES, "all"):
        here = [mutant for mutant in tried if room in (mutant["room"], "all")]
        kinds = Counter("equivalent" if mutant.get("equivalent") else mutant["status"] for mutant in here)
        counts = [len(here), *(kinds[kind] for kind in ("killed", "timed out", "equivalent", "survived"))]
        lines.append(f"| {room} | {' | '.join(map(str, counts))} |")
    for mutant in tried:
        if mutant.get("equivalent"):
            lines.append(f"\nequivalent: {mutant['id']}: {mutant['equivalent']}")
        elif mutant["status"] != "killed":
            lines.append(f"\n{mutant['status']}: {mutant['id']}: {mutant['before']!r} -> {mutant['after']!r}")
    return "\n".join(lines)


def show(record: dict[str, Any]) -> str:
    """The mutant as a diff."""
    source = (ROOT / SOURCE / record["file"]).read_bytes()
    changed = faulty(record, source)
    if changed is None:
        return f"{record['id']}: the place is not there any more"
    sides = (source.decode().splitlines(), changed.decode().splitlines())
    return "\n".join(difflib.unified_diff(*sides, lineterm="", fromfile=record["file"], tofile=record["id"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=15)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--seconds", type=float, default=600.0, help="for a run of tests")
    parser.add_argument("--wide", action="store_true", help="run the tests of the whole room too")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no other mutant after that")
    parser.add_argument("--states", type=Path, default=STATES)
    parser.add_argument(
        "--retry", metavar="STATUS", help="run those again that are killed, survived, 'timed out' or stale"
    )
    parser.add_argument("--rooms", nargs="+", default=[*FILES], choices=[*FILES], help="mutants of these only")
    parser.add_argument("--only", metavar="ID", help="run this one, whatever its status")
    parser.add_argument("--judge", nargs=2, metavar=("ID", "REASON"), help="record why a mutant computes the same")
    parser.add_argument("--show", metavar="ID")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    record, book = Recorder(__file__, "mutants.md"), Book(given.states)
    if given.table:
        print(table(book))
        write(book, record)
    elif given.show:
        print(show(book.of(given.show)))
    elif given.judge:
        book.note(book.of(given.judge[0]), equivalent=given.judge[1])
    else:
        book.begin(given.seed, given.count, given.rooms)
        wanted = [book.of(given.only)] if given.only else [
            mutant
            for mutant in book.content["mutants"]
            if mutant["status"] == given.retry and not mutant.get("equivalent") and mutant["room"] in given.rooms
        ]  # fmt: skip
        run(book, wanted, given.jobs, given.seconds, given.minutes, given.wide)
        print(table(book))
        write(book, record)


def write(book: Book, record: Recorder) -> None:
    """Write the record: of the mutants tried, how many were killed and how many are equivalent."""
    tried = [mutant for mutant in book.content["mutants"] if mutant["status"] not in (None, "stale")]
    kinds = Counter("equivalent" if mutant.get("equivalent") else mutant["status"] for mutant in tried)
    others = ", ".join(f"{kinds[kind]} {kind}" for kind in ("equivalent", "timed out", "survived"))
    for status in ("killed", "survived"):
        claim = "mutants killed by a test" if status == "killed" else "mutants that survived"
        record.add(claim, "mutants", kinds[status], peer="all mutants tried", peer_values=len(tried), note=others)
    record.write()


def run(book: Book, wanted: list[dict[str, Any]], jobs: int, seconds: float, minutes: float, wide: bool) -> None:
    """Try mutants, ``jobs`` at a time; begin no other after ``minutes``."""
    until = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as threads:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(jobs):
            copies.put(Copy(Path(folder) / str(number)))

        def try_mutant(record: dict[str, Any]) -> None:
            if time.monotonic() > until:
                return
            copy = copies.get()
            try:
                book.note(record, **copy.try_(record, seconds, wide))
            finally:
                copies.put(copy)
            print(f"{record['status']}: {record['id']} ({record.get('by')})", flush=True)

        for future in [threads.submit(try_mutant, record) for record in wanted]:
            future.result()


if __name__ == "__main__":
    main()
