"""Difference of each layout from one process: the largest relative differences over some steps, and their bounds.

Trains the models of tests/distributed in float32 on gloo processes and prints a table for docs/notebook/layouts.md.

    python benchmarks/same_model.py [--steps 20]
"""

import argparse
import os
import sys
from pathlib import Path

from results import Recorder

os.environ.setdefault("OMP_NUM_THREADS", "1")  # eight processes on a few cores
sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of tests/


def main():
    """Print and record the table."""
    import torch

    from tests.support.distributed.comparing import differences, reference
    from tests.support.distributed.jobs import train
    from tests.support.distributed.layouts import CASES, STEPS, recipe_content
    from tests.support.distributed.workers import Pool

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args().steps
    record, pool = Recorder(__file__, "layouts.md"), Pool(8)
    print("| layout | processes | loss | gradient norm | weights | bound of the last step |")
    print("|---|---|---|---|---|---|")
    try:
        for case in CASES:
            parts = pool.run(case.world, train, recipe_content(case), steps, torch.float32)
            found = differences(case, parts, reference(case, torch.float32, steps), torch.float32)
            sizes = " | ".join(f"{found[name].size:.1e}" for name in ("loss", "gradient norm", "weights"))
            print(f"| {case} | {case.world} | {sizes} | {found['weights'].bound:.1e} |", flush=True)
            size, bound = float(found["weights"].size), float(found["weights"].bound)
            claim = f"difference of the weights from one process after {steps} steps, relative to their change, {case}"
            record.add(claim, "1", size, peer="derived bound", peer_values=bound)
        record.write()
    finally:
        pool.close()


if __name__ == "__main__":
    main()
