"""Cost of a rehearsal: seconds, CPU seconds and memory of ``hlat rehearse``, for the runs of the HLAT paper.

    python benchmarks/rehearsal.py [--only hlat-7b]

Seconds are wall time, on a machine that does nothing else; memory is the peak of the largest process.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

from results import Recorder

RUNS = {"hlat-7b": 2048, "hlat-70b": 8192}


def cost(recipe, world):
    """Rehearse: wall seconds, CPU seconds of all processes, GiB of the largest so far, and the report."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "hlat", "rehearse", recipe, "--world", str(world), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, busy, after.ru_maxrss / (1 << 20), json.loads(done.stdout)


def main():
    """Print and record a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=RUNS)
    only, record = parser.parse_args().only, Recorder(__file__, "rehearsal.md")
    print("| recipe | processes | ranks | seconds | CPU seconds | GiB | peak of a rank, GiB |")
    print("|---|---|---|---|---|---|---|")
    for recipe, world in RUNS.items():
        if only in (None, recipe):
            seconds, busy, gib, found = cost(recipe, world)
            peaks = ", ".join(f"{rank['memory']['peak_bytes'] / (1 << 30):.2f}" for rank in found["ranks"])
            print(f"| {recipe} | {world} | {len(found['ranks'])} | {seconds:.0f} | {busy:.0f} | {gib:.2f} | {peaks} |")
            what = f"rehearsal of {len(found['ranks'])} rank(s) of {recipe} in {world:,} processes"
            record.add(f"{what}: wall time", "s", seconds, note=f"{busy:.0f} s of CPU; peaks of the ranks {peaks} GiB")
            record.add(f"{what}: memory of the largest process", "GiB", gib)
    record.write()


if __name__ == "__main__":
    main()
