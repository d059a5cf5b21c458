"""Coordinate checks of the transfer rules: slopes over widths of 64 to 1,024 and depths of 2 to 32 layers.

    python benchmarks/coordinates.py [--steps 5]

AdamW and Muon (to width 512), a LLaMA and a Qwen 3 (norms of queries and keys, two query heads for each kv head), with
completep, whose rows for widths are those of mup, and without transfer. The base has width 64 and 2 layers. Prints
every table of ``hlat ladder --coordinates``, and records for each axis the slope that is farthest from zero among those
that are expected to be zero.
"""

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hlat.config import parse_recipe
from hlat.ladder import STEPS, WIDTHS, coordinate_lines, coordinate_table
from results import Recorder

KINDS = {"adamw": {"lr": 4e-3}, "muon": {"lr": 2e-2, "adamw_lr": 1e-3}}
SIZES = {"adamw": WIDTHS, "muon": WIDTHS[:-1]}  # Newton-Schulz at width 1,024 takes minutes on a core
MODELS = {"llama": {}, "qwen3": {"qk_norm": True, "kv_heads": 2}}
RULES = {"completep": {"transfer": "completep", "base_hidden_size": 64, "base_layers": 2}, "none": {}}


def check(kind, model, rule, steps):
    """Print the table of one recipe; return it."""
    sizes = {"vocab_size": 256, "layers": 2, "hidden_size": 64, "intermediate_size": 176, "heads": 4}
    recipe = {
        "run": {"name": f"{model}-{kind}-{rule}"},
        "model": sizes | MODELS[model],
        "data": {"path": "unused", "sequence_length": 64, "tokenizer": {"train": "char"}},
        "optimizer": {"kind": kind, **KINDS[kind], **RULES[rule]},
        "training": {"steps": 10},
    }
    began = time.monotonic()
    table = coordinate_table(parse_recipe(recipe), SIZES[kind], steps=steps)
    print("\n".join(coordinate_lines(table)), f"\n({time.monotonic() - began:.0f} s)\n", flush=True)
    return table


def farthest(table, axis):
    """The slope farthest from zero, of those for which zero is expected."""
    return max((row.slope for row in table.rows if row.axis == axis and row.expected == (0.0, 0.0)), key=abs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    options, record = parser.parse_args(), Recorder(__file__, "transfer.md")
    for kind in KINDS:
        for model in MODELS:
            tables = {rule: check(kind, model, rule, options.steps) for rule in RULES}
            for axis, sizes in tables["none"].axes.items():
                broken = [row for row in tables["completep"].broken if row.axis == axis]
                record.add(
                    f"slope farthest from 0 over {axis} {sizes[0]:,} to {sizes[-1]:,}, {model}, {kind}, completep",
                    "1",
                    farthest(tables["completep"], axis),
                    peer="the same without transfer",
                    peer_values=farthest(tables["none"], axis),
                    note=f"of sizes and changes that should not depend on it; {len(broken)} rows outside the bound",
                )
    record.write()


if __name__ == "__main__":
    main()
