"""Seconds to the end of the first compiled step: nothing compiled, everything in the cache, unpacked from an archive.

A 34 M parameter model (8 layers, 512 wide), 2 x 256 tokens, bf16 products, on this machine's CPU. ``hlat compile``
fills the cache; each measurement is a new process that computes one step and one validation pass as a run does.

    python benchmarks/compile_cache.py
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import Recorder

RECIPE = {
    "run": {"name": "compiled", "compile": "blocks", "device": "cpu"},
    "model": {"vocab_size": 8192, "layers": 8, "hidden_size": 512, "intermediate_size": 1408, "heads": 8},
    "data": {"path": "none", "sequence_length": 256, "tokenizer": {"train": "char"}},
    "batch": {"global_batch": 2, "micro_batch": 2},
    "training": {"steps": 10},
    "precision": {"mode": "mixed"},
}


def first_step(recipe_file: str, compile_mode: str, cache: str) -> None:
    """Compute a step and a validation pass, and print seconds and what torch's cache had."""
    import torch
    from torch._dynamo.utils import counters

    from hlat.config import load_recipe
    from hlat.parallel import MicroBatch, build_parallel
    from hlat.runtime.distributed.join import joined_run

    recipe = load_recipe(recipe_file, [f"run.compile={compile_mode}", f"run.compile_cache={cache}"], world=1)
    with joined_run("cpu", True, None, cache) as runtime:
        model = build_parallel(recipe, runtime, seed=1)
        tokens = torch.zeros(2, 256, dtype=torch.int64)
        began = time.perf_counter()
        model.accumulate_gradients(tokens, tokens)
        first = time.perf_counter() - began
        model.evaluate([MicroBatch(tokens, tokens)])
        both = time.perf_counter() - began
        began = time.perf_counter()
        model.accumulate_gradients(tokens, tokens)
        second = time.perf_counter() - began
    found = counters["inductor"]
    cached = (found["fxgraph_cache_hit"], found["fxgraph_cache_miss"])
    print(json.dumps({"first": first, "both": both, "second": second, "cached": cached}))


def measure(recipe: Path, compile_mode: str, cache: Path) -> dict:
    """Run ``first_step`` in a new process."""
    words = [sys.executable, __file__, "--step", str(recipe), compile_mode, str(cache)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def compile_command(recipe: Path, cache: Path, *options: str) -> float:
    """Run ``hlat compile``; return its seconds."""
    began = time.perf_counter()
    words = ["-P", "-m", "hlat", "compile", str(recipe), f"run.compile_cache={cache}", *options]
    subprocess.run([sys.executable, *words], check=True, capture_output=True, cwd=recipe.parent)
    return time.perf_counter() - began


def main() -> None:
    """Print and record the table."""
    record = Recorder(__file__, "accelerators.md")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe, archive = folder / "recipe.yaml", folder / "code.tar"
        recipe.write_text(json.dumps(RECIPE))
        times = {"not compiled": measure(recipe, "none", folder / "eager")}
        times["nothing in the cache"] = measure(recipe, "blocks", folder / "cold")
        filling = compile_command(recipe, folder / "filled", "--to", str(archive))
        times["after hlat compile"] = measure(recipe, "blocks", folder / "filled")
        unpacking = compile_command(recipe, folder / "unpacked", "--unpack", str(archive))
        times["after unpacking"] = measure(recipe, "blocks", folder / "unpacked")
        size = archive.stat().st_size
    print(f"{'':>22} {'first step':>11} {'and validation':>15} {'second step':>12} {'hits, misses':>13}")
    for name, found in times.items():
        print(
            f"{name:>22} {found['first']:11.2f} {found['both']:15.2f} {found['second']:12.2f} {found['cached']!s:>13}"
        )
        record.add(f"34 M model, {name}: end of the first step", "s", found["first"])
        record.add(f"34 M model, {name}: end of the first step and a validation pass", "s", found["both"])
    print(f"hlat compile {filling:.1f} s, --from {unpacking:.1f} s, archive {size / 1e6:.2f} MB")
    record.add("34 M model: hlat compile --out, imports included", "s", filling)
    record.add("34 M model: hlat compile --from, imports included", "s", unpacking)
    record.add("34 M model: archive of compiled code", "MB", size / 1e6)
    record.write()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads would wait for each other on a busy machine
    first_step(*sys.argv[2:]) if sys.argv[1:2] == ["--step"] else main()
