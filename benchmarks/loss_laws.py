"""Forecasts of published runs by laws fitted to smaller runs of the same ladder.

    published ladders --smaller runs--> Ladder.forecast of each larger run, next to its loss
                      --all runs--> our constants, next to the published ones

python benchmarks/loss_laws.py FOLDER            # ladders that constants of the fit were chosen on
python benchmarks/loss_laws.py FOLDER --judge    # and the others, predicted below before anyone looked

``published_ladders`` says which repositories the folder must have. A ladder is fitted to the quarter and to the half
of its runs with the fewest FLOPs, and to 8 and 12 runs drawn from these, as a ladder of one's own would have; every
run beyond is forecast. Runs of one ladder err alike, so the share of a ladder is one number, and the mean is over
ladders.
"""

import argparse
import math
from itertools import pairwise
from pathlib import Path

import numpy as np

from hlat.forecast import CHINCHILLA, Ladder, LadderRun, Observation, fit_law
from hlat.runtime.errors import PlanError
from published_ladders import chinchilla, published
from results import Recorder

CHOSEN_ON = ("chinchilla", "gadre c4_original", "marin dclm")
PREDICTED = {"gadre rpj": 0.90, "gadre rw_original": 0.90, "llama 3": 0.85, "olmo": 0.85, "gemstones": 0.70,
             "misfitting": 0.70, "marin comma": 0.65, "marin nemotron": 0.65}  # fmt: skip
"""Share of larger runs in the ranges, guessed on 2026-11-29 before they were forecast; of all ladders 0.78."""
DRAWS = 4
BEYOND = (1, 3, 10, 30, 100, math.inf)


def ladder_of(runs):
    return Ladder(tuple(LadderRun(str(number), run.sizes, run.tokens, run.loss, ((1.0, run.loss),), run.trunk)
                        for number, run in enumerate(runs)), {})  # fmt: skip


def flops(run):
    return run.tokens * run.sizes.get("flops", next(iter(run.sizes.values())))


def splits(runs):
    """Yield what is fitted and what is forecast."""
    ordered = sorted(runs, key=flops)
    for share in (0.25, 0.5):
        count = round(share * len(ordered))
        smaller, larger = ordered[:count], ordered[count:]
        yield f"{share:.0%}", smaller, larger
        for few in (8, 12):
            for draw in range(DRAWS if count > few else 0):
                chosen = np.random.default_rng(100 * few + draw).choice(count, few, replace=False)
                yield f"{few} of {share:.0%}", [smaller[one] for one in sorted(chosen)], larger


def forecasts(name, runs):
    """Yield ladder, split, factor beyond its largest run, error and half width of log(loss), held or not."""
    for split, smaller, larger in splits(runs):
        ladder = ladder_of(smaller)
        most = max(map(flops, smaller))
        for run in larger:
            try:
                end = ladder.forecast(run.sizes, run.tokens).end
            except PlanError:
                yield name, split, flops(run) / most, math.nan, math.nan, False
                continue
            error, half = math.log(end.loss / run.loss), math.log(end.high / end.low) / 2
            yield name, split, flops(run) / most, error, half, end.low <= run.loss <= end.high


def shown(title, rows):
    given = [row for row in rows if not math.isnan(row[3])]
    if not given:
        return f"{title:28} {len(rows):5} refused"
    error, half = (100 * np.median([abs(row[at]) for row in given]) for at in (3, 4))
    bias = 100 * np.mean([row[3] for row in given])
    refused = 1 - len(given) / len(rows)
    return (f"{title:28} {len(rows):5} {held(rows):6.0%} {error:6.2f} % {bias:+6.2f} % {half:6.2f} % "
            f"{refused:6.0%}")  # fmt: skip


def held(rows):
    given = [row[5] for row in rows if not math.isnan(row[3])]
    return float(np.mean(given)) if given else math.nan


def constants(record, folder):
    """Compare our fit to all of Chinchilla's runs with that of Besiroglu et al. 2024, who leave out five."""
    runs = sorted(chinchilla(folder), key=lambda run: run.loss)[:-5]
    law = fit_law([Observation(run.sizes["total"], run.tokens, run.loss) for run in runs])
    theirs = (CHINCHILLA.irreducible, CHINCHILLA.alpha, CHINCHILLA.beta)
    for name, value, other in zip(("E", "alpha", "beta"), (law.irreducible, law.alpha, law.beta), theirs, strict=True):
        print(f"Chinchilla's {name}: {value:.4f}, Besiroglu et al. 2024: {other}")
        record.add(
            f"{name} of the law of Chinchilla's runs", "1", value, peer="Besiroglu et al. 2024", peer_values=other
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--judge", action="store_true", help="also ladders that nothing was chosen on; writes a record")
    arguments = parser.parse_args()
    record = Recorder(__file__, "forecasts.md")
    ladders = published(arguments.folder)
    names = [name for name in ladders if name in CHOSEN_ON or arguments.judge]
    rows = [row for name in names for row in forecasts(name, ladders[name])]
    print(f"{'':28} {'runs':>5} {'held':>6} {'error':>8} {'bias':>8} {'half':>8} {'refused':>7}")
    for name in names:
        mine = [row for row in rows if row[0] == name]
        for split in dict.fromkeys(row[1] for row in mine):
            print(shown(f"{name}, {split}", [row for row in mine if row[1] == split]))
    for kind, those in (("chosen on", CHOSEN_ON), ("judged", tuple(PREDICTED))):
        for low, high in pairwise(BEYOND):
            some = [row for row in rows if row[0] in those and low <= row[2] < high]
            if some:
                print(shown(f"{kind}, {low:g} to {high:g} times", some))
        shares = {name: held([row for row in rows if row[0] == name]) for name in those if name in names}
        if shares:
            print(kind, ", ".join(f"{name} {share:.0%}" for name, share in shares.items()),
                  f"mean {np.mean(list(shares.values())):.0%}")  # fmt: skip
            for name, share in shares.items():
                mine = [row for row in rows if row[0] == name and not math.isnan(row[3])]
                note = f"predicted {PREDICTED[name]}" if name in PREDICTED else "constants were chosen on it"
                record.add(f"share of larger runs of {name} within the range of 4 of 5", "1", share, note=note)
                record.add(f"median error of the loss forecast for larger runs of {name}", "%",
                             100 * float(np.median([abs(row[3]) for row in mine])))  # fmt: skip
            record.add(f"mean share of larger runs within the range, ladders {kind}", "1",
                         float(np.mean(list(shares.values()))))  # fmt: skip
    constants(record, arguments.folder)
    if arguments.judge:
        record.write()


if __name__ == "__main__":
    main()
