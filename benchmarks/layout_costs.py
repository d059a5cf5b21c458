"""Memory and communication of the layouts, measured in real processes and compared with what they should be.

Trains a small model for two steps in every layout that the tests measure (tests/distributed) and prints two tables:
bytes of parameters, gradients and optimizer state of each rank, compared with ``stage_layers.py``; and
messages of a step by kind, compared with the counts of the literature.

    python benchmarks/layout_costs.py [--memory] [--communication]
"""

import argparse
import os
import sys
from pathlib import Path

from results import Recorder

os.environ.setdefault("OMP_NUM_THREADS", "1")  # eight processes on a few cores
sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of tests/


def memory(pool, record):
    """Print the table of bytes, and record how many ranks use exactly the bytes of the formula."""
    from tests.support.distributed import memory_rows

    measured = {
        row.name: pool.run(row.world, memory_rows.measure, memory_rows.content_of(row)) for row in memory_rows.ROWS
    }
    print(memory_rows.table(measured))
    pairs = [
        pair for row in memory_rows.ROWS for pair in zip(measured[row.name], memory_rows.expected(row), strict=True)
    ]
    same = sum(a == b for a, b in pairs)
    print(f"\n{same} of {len(pairs)} ranks use the bytes of the formula, byte for byte.\n")
    claim = "ranks whose bytes of parameters, gradients and optimizer state equal the formula"
    record.add(claim, "ranks", same, peer="all ranks", peer_values=len(pairs))


def communication(pool, record):
    """Print the table of messages; record how many ranks send those of the literature and explained differences."""
    from tests.support.distributed import textbook, traffic

    counted = {}
    for row in traffic.ROWS:
        ranks = pool.run(row.world, traffic.count, row.content)
        wanted = [textbook.expected(row.recipe, row.world, rank) for rank in range(row.world)]
        counted[row.name] = list(zip(ranks, wanted, strict=True))
    print(textbook.table(counted))
    pairs = [(messages, textbook.total(wanted)) for ranks in counted.values() for messages, wanted in ranks]
    same = sum(messages == wanted for messages, wanted in pairs)
    print(f"\n{same} of {len(pairs)} ranks send what the textbook and the last column say, message for message.")
    claim = "ranks whose messages of a step equal the textbook's with the explained differences"
    record.add(claim, "ranks", same, peer="all ranks", peer_values=len(pairs))


def main():
    """Print the table that the options name, or both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", action="store_true", help="only bytes of state")
    parser.add_argument("--communication", action="store_true", help="only messages")
    options = parser.parse_args()
    from tests.support.distributed.workers import Pool

    record, pool = Recorder(__file__, "layouts.md"), Pool(8)
    try:
        if options.memory or not options.communication:
            memory(pool, record)
        if options.communication or not options.memory:
            communication(pool, record)
        record.write()
    finally:
        pool.close()


if __name__ == "__main__":
    main()
