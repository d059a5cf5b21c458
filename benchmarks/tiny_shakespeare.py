"""nanoGPT's CPU anchor: the shipped recipe with three seeds, validation loss over the whole validation split.

    python benchmarks/tiny_shakespeare.py ../shared/data/text/tinyshakespeare.txt [--seeds 1 2 3] [a.b=c ...]

nanoGPT publishes 1.88 for the same budget (character-level, 4 layers, 4 heads, width 128, context 64, batch 12, 2000
steps, 0.80 M parameters), measured on sampled batches of the same split.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from hlat.config import load_recipe
from hlat.model.counts import count_parameters
from hlat.training import run
from results import Recorder

PUBLISHED = 1.88


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337, 1, 2])
    parser.add_argument("overrides", nargs="*")
    arguments, record = parser.parse_args(), Recorder(__file__, "quickstart.md")
    losses = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            common = [f"data.path={arguments.text}", f"run.dir={folder}", "tracking.console=none"]
            recipe = load_recipe("tiny-shakespeare", [*common, f"training.seed={seed}", *arguments.overrides])
            begin = time.monotonic()
            result = run(recipe).validation
        losses.append(result.loss)
        print(
            f"seed {seed}: validation loss {result.loss:.4f} ({result.bits_per_byte:.4f} bits per byte) over "
            f"{result.tokens:,} characters, {count_parameters(recipe.model).total:,} parameters, "
            f"{time.monotonic() - begin:.0f} s",
            flush=True,
        )
    print(f"mean {statistics.mean(losses):.4f}, worst {max(losses):.4f}, nanoGPT's published {PUBLISHED}")
    claim = "validation loss of tiny-shakespeare over the complete validation split, by seed"
    note = " ".join(["tiny-shakespeare", *arguments.overrides])
    record.add(claim, "nats", losses, peer="nanoGPT's README, sampled batches", peer_values=PUBLISHED, note=note)
    record.write()


if __name__ == "__main__":
    main()
