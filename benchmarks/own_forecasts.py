"""Losses of runs whose forecasts were committed before they began: a ladder of each text, then larger models of it.

    python benchmarks/own_forecasts.py FOLDER NAME=TEXT ... --ladder   # 12 small runs of each text: 45 minutes
    python benchmarks/own_forecasts.py FOLDER NAME=TEXT ...            # forecasts, with the losses that are there
    python benchmarks/own_forecasts.py FOLDER NAME=TEXT ... --train    # 2 larger runs of each text: 45 minutes

Times are of one core. ``own_forecasts.yaml`` is the recipe. Each command goes on where it was stopped. A run of its
targets registers the same forecast by ``run.ladder``; the table says if its file does not agree.
"""

import argparse
import os
from datetime import UTC, datetime
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hlat.config import load_recipe
from hlat.forecast import read_forecast, read_ladder
from hlat.reporting import read_run
from hlat.runtime.errors import DataError
from hlat.sweep import run_hlat
from results import Recorder

RECIPE = Path(__file__).with_suffix(".yaml")
LADDER = ("--sizes", "0.44M,0.73M,1.42M,2.46M", "--tokens", "0.8,1.6", "--budget", "3h")
TARGETS = ((320, 8, 2_000_000), (256, 6, 2_000_000))
"""Width, layers and tokens: 10 and 5 million parameters."""
SEED = 2  # of the targets; ladders have that of the recipe, 1


def words_of(folder, name, text, width, layers, tokens):
    """Overrides of a target; warm-up is the same share of each."""
    heads = width // 32
    run = f"{name}-{width}x{layers}-{tokens / 1e6:g}M"
    return [
        f"data.path={text}",
        f"data.prepared_dir={folder}/{name}-ladder/data",
        f"run.dir={folder}/{run}",
        f"run.ladder={folder}/{name}-ladder",
        *(f"model.{field}={value}" for field, value in (("hidden_size", width), ("layers", layers), ("heads", heads))),
        f"model.kv_heads={heads}",
        f"model.intermediate_size={width * 11 // 4}",
        f"training.tokens={tokens}",
        f"training.seed={SEED}",
        f"schedule.warmup_steps={round(0.0256 * tokens / 1024)}",
    ]


def outcome(recipe):
    """Validation loss at the end of a run; None before."""
    try:
        steps, losses = read_run(recipe.run_dir).metrics.get("val_loss", ((), ()))
    except DataError:
        return None
    return float(losses[-1]) if len(steps) and steps[-1] == recipe.total_steps else None


def rows(folder, texts):
    """Yield the name of a text, the forecast of a run, and its loss or None."""
    for name, text in texts.items():
        ladder = read_ladder(folder / f"{name}-ladder")
        for target in TARGETS:
            recipe = load_recipe(str(RECIPE), words_of(folder, name, text, *target))
            forecast = ladder.forecast_recipe(recipe)
            registered = read_forecast(recipe.run_dir)
            if registered is not None and registered.end != forecast.end:
                print(f"{recipe.run_dir}: registered {registered.end}, and the ladder has another one now")
            yield name, forecast, outcome(recipe)


def show(folder, texts, record):
    """Print the table, and record errors if every run has ended."""
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC\n")
    print("| text | ladder | parameters | tokens | forecast | range of 4 of 5 | loss | error | in the range |")
    print("|---|---|---|---|---|---|---|---|---|")
    done = []
    for name, forecast, loss in rows(folder, texts):
        size, tokens, end = forecast.sizes["total"] / 1e6, forecast.tokens / 1e6, forecast.end
        found = ["", "", ""]
        if loss is not None:
            held = end.low <= loss <= end.high
            found = [f"{loss:.4f}", f"{end.loss / loss - 1:+.2%}", "yes" if held else "**no**"]
            claim = f"loss of {size:.1f} M parameters on {tokens:.1f} M tokens of {name}"
            note, peer = "in the range" if held else "outside", f"forecast of ladder {forecast.ladder}"
            record.add(claim, "nats per token", loss, peer=peer, peer_values=[end.low, end.loss, end.high], note=note)
            done.append((abs(end.loss / loss - 1), held))
        cells = [name, f"`{forecast.ladder[:8]}`", f"{size:.2f} M", f"{tokens:.1f} M", f"{end.loss:.4f}"]
        print("| " + " | ".join([*cells, f"{end.low:.4f} to {end.high:.4f}", *found]) + " |")
    if len(done) == len(texts) * len(TARGETS):
        held = sum(inside for _, inside in done)
        print(f"\n{held} of {len(done)} in the range; worst error {max(error for error, _ in done):.2%}")
        record.write()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=lambda text: Path(text).absolute())
    parser.add_argument("texts", nargs="+", metavar="NAME=TEXT")
    parser.add_argument("--ladder", action="store_true")
    parser.add_argument("--train", action="store_true")
    options, record = parser.parse_args(), Recorder(__file__, "forecasts.md")
    texts = {name: Path(path).absolute() for name, _, path in (text.partition("=") for text in options.texts)}
    for name, text in texts.items():
        if options.ladder:
            to = ("--to", str(options.folder / f"{name}-ladder"))
            run_hlat(["ladder", str(RECIPE), f"data.path={text}", f"run.name={name}", *LADDER, *to], silent=False)
        if options.train:
            for target in TARGETS:
                run_hlat(["train", str(RECIPE), *words_of(options.folder, name, text, *target)], silent=False)
    show(options.folder, texts, record)


if __name__ == "__main__":
    main()
