"""Cost against scale: layers, parameters, ranks, samples, checkpoints, metrics; with the exponent of each.

    python benchmarks/scale.py [--only layers,metrics] [--rounds N] [--quick] [--gigabytes 1 4 10]

Each row is one operation at several sizes: processor seconds of one thread (of checkpoints also seconds by the clock),
the least of some rounds after one that does not count. The exponent p of cost = a + b size^p is estimated twice: the
slope of a line through all points in log-log scale, and the slope of the last two points, where the constant part
matters least. A slope above 1 of the last two is superlinear.
"""

import argparse
import gc
import itertools
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hlat.checkpoint import collect, list_checkpoints, restore
from hlat.checkpoint.protocol.reader import open_checkpoint, verify_checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.config import Recipe
from hlat.data.samples.order import EpochOrder, Mixture, PhaseWeights
from hlat.data.samples.packing import fit_documents
from hlat.data.samples.training_data import Batch
from hlat.hardware import load_catalog, parse_cluster
from hlat.model.counts import flops_per_token
from hlat.model.parameter_layout import parameter_layouts
from hlat.optim import build_optimizer
from hlat.parallel import build_parallel
from hlat.planner.plan import make_plan
from hlat.planner.problem.question import PlanQuestion
from hlat.planner.problem.request import resolve_request
from hlat.rehearsal import rehearse_rank
from hlat.reporting import list_runs, report_page
from hlat.runtime.distributed.join import fake_rank, joined_run
from hlat.tracking.records import MetricsFile, read_last_metrics
from hlat.training import accumulate_gradients, update
from results import Recorder

Operation = Callable[[], Any]

_GIGABYTES = (0.25, 0.5, 1, 2)


@dataclass
class Row:
    """Costs of one operation, in seconds, by size."""

    name: str
    size: str
    sizes: list[float]
    seconds: list[float]

    @property
    def slope(self) -> float:
        """Slope of the line through all points, least squares in log-log scale."""
        return statistics.linear_regression(list(map(math.log, self.sizes)), list(map(math.log, self.seconds))).slope

    @property
    def last_slope(self) -> float:
        """Slope of the line through the last two points in log-log scale."""
        (before, last), (cheaper, dearer) = self.sizes[-2:], self.seconds[-2:]
        return math.log(dearer / cheaper) / math.log(last / before)


class Table:
    """Rows that are being measured."""

    def __init__(self, rounds: int) -> None:
        self.rows: dict[str, Row] = {}
        self._rounds = rounds

    def measure(self, name: str, size_name: str, size: float, operation: Operation, *, once: bool = False) -> None:
        """Add the processor seconds of an operation at a size; ``once``: it cannot be repeated."""
        if not once:
            operation()
        spent = []
        for _ in range(1 if once else self._rounds):
            gc.collect()
            gc.disable()  # as the training loop does between its steps
            begin = time.process_time()
            operation()
            spent.append(time.process_time() - begin)
            gc.enable()
        self.add(name, size_name, size, min(spent))

    def add(self, name: str, size_name: str, size: float, seconds: float) -> None:
        """Add seconds at a size."""
        row = self.rows.setdefault(name, Row(name, size_name, [], []))
        row.sizes.append(size)
        row.seconds.append(max(seconds, 1e-6))
        print(f"  {name}: {size_name} {size:g}: {seconds:.4g} s", flush=True)


def tiny_recipe(folder: Path, **model: int) -> Recipe:
    """A recipe of a small model without text; nothing of its data is opened."""
    return Recipe.model_validate(
        {
            "run": {"name": "scale", "dir": str(folder / "run"), "device": "cpu"},
            "model": {
                "vocab_size": 512,
                "hidden_size": 64,
                "heads": 2,
                "kv_heads": 2,
                "intermediate_size": 128,
                "layers": 2,
            }
            | model,
            "data": {"path": str(folder / "none.txt"), "sequence_length": 32},
            "batch": {"global_batch": 1, "micro_batch": 1},
            "optimizer": {"lr": 1e-3},
            "training": {"steps": 10},
            "precision": {"mode": "fp32"},
        }
    )


def measure_model(table: Table, size_name: str, size: float, recipe: Recipe, runtime: Any) -> None:
    """Building, naming, a step and its parts, and the state for a checkpoint, of a model in one process."""
    measure = table.measure

    def build() -> Any:
        return build_parallel(recipe, runtime, 1)

    measure(f"build the model, by {size_name}", size_name, size, build)
    measure(f"names and rows of parameters, by {size_name}", size_name, size, lambda: parameter_layouts(recipe.model))
    measure(f"FLOPs per token, by {size_name}", size_name, size, lambda: flops_per_token(recipe.model, 32))
    model = build()
    optimizer = build_optimizer(model.local_parameters, recipe.optimizer, "fp32", 1, model.matrices)
    tokens = torch.randint(0, 512, (1, 33), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], np.arange(1), 32)
    steps = itertools.count(1)

    def step() -> None:
        update(model, optimizer, recipe, next(steps), accumulate_gradients(model, batch))

    measure(f"training step, by {size_name}", size_name, size, lambda: [step() for _ in range(3)])
    accumulate_gradients(model, batch)
    measure(f"norm and optimizer, by {size_name}", size_name, size, lambda: _update_again(model, optimizer, recipe))
    state = lambda: collect(recipe.model, model.local_parameters, optimizer)  # noqa: E731
    measure(f"state for a checkpoint, by {size_name}", size_name, size, state)


def _update_again(model: Any, optimizer: Any, recipe: Recipe) -> None:
    """Norm, clipping and update with the same gradients."""
    _, norm = model.reduce_loss_and_norm(torch.zeros(()))
    optimizer.clip_gradients(norm, 1.0)
    optimizer.step()


def layers(table: Table, quick: bool) -> None:
    """Layers, at a width where each is cheap: what Python does for each of them."""
    with tempfile.TemporaryDirectory() as folder, joined_run("cpu") as runtime:
        for count in (8, 16, 32) if quick else (8, 16, 32, 64, 128):
            measure_model(table, "layers", count, tiny_recipe(Path(folder), layers=count), runtime)


def parameters(table: Table, quick: bool) -> None:
    """Parameters, at 4 layers."""
    with tempfile.TemporaryDirectory() as folder, joined_run("cpu") as runtime:
        for width in (256, 512) if quick else (256, 512, 1024, 2048):
            model = {"layers": 4, "hidden_size": width, "intermediate_size": 4 * width, "heads": 4, "kv_heads": 4}
            recipe = tiny_recipe(Path(folder), **model)
            count = sum(math.prod(layout.shape) for layout in parameter_layouts(recipe.model).values())
            measure_model(table, "parameters", count, recipe, runtime)


def ranks(table: Table, quick: bool) -> None:
    """World size: a rank of a fake process group, and the choice of a layout for so many devices."""
    with tempfile.TemporaryDirectory() as folder:
        for world in (1, 2, 4) if quick else (1, 2, 4, 8, 16, 32):
            for name, parallel in (("data parallel, ZeRO 3", {"zero": 3}), ("pipeline", {"pipeline": world})):
                if name == "pipeline" and world < 4:
                    continue  # one rank has all layers, and 32 micro-batches
                model = {
                    "layers": 8 if name != "pipeline" else 32,
                    "hidden_size": 256,
                    "heads": 4,
                    "kv_heads": 4,
                    "intermediate_size": 512,
                }
                values = tiny_recipe(Path(folder), **model).model_dump(mode="json")
                batch = {"global_batch": max(32, world), "micro_batch": 1}
                steady = {"global_batch": world, "micro_batch": 1} if name != "pipeline" else batch
                recipe = Recipe.model_validate(values | {"parallel": parallel, "batch": steady})
                with fake_rank(0, world) as runtime:
                    rehearsed = lambda recipe=recipe, runtime=runtime: rehearse_rank(recipe, runtime)  # noqa: E731
                    table.measure(f"step of rank 0, fake group, {name}, by ranks", "ranks", world, rehearsed)


def planning(table: Table, quick: bool) -> None:
    """Devices that a plan chooses a layout for."""
    for nodes in (1, 4, 16) if quick else (1, 4, 16, 64, 256):
        request = resolve_request(PlanQuestion("hlat-7b"), parse_cluster(f"trn1.32xlarge:{nodes}", load_catalog()))
        table.measure("hlat plan, by devices", "devices", 32 * nodes, lambda request=request: make_plan(request))


def samples(table: Table, quick: bool) -> None:
    """Samples of the training data: its order, its mixture; and documents of a packing plan."""
    positions = np.random.default_rng(0)
    for exponent in (6, 8) if quick else (6, 7, 8, 9, 10):
        count = 10**exponent

        def order(count: int = count) -> None:
            made = EpochOrder([count], [1.0], 1, True)
            for first in positions.integers(0, count - 1024, 20):
                made.items(np.arange(first, first + 1024))

        def mixture(count: int = count) -> None:
            made = Mixture([PhaseWeights((50, 30, 20), count // 2), PhaseWeights((1, 2, 7))])
            made.counts(count)
            for first in positions.integers(0, count - 1024, 20):
                made.locate(np.arange(first, first + 1024))

        table.measure("order of 20 batches of 1,024, by samples", "samples", count, order)
        table.measure("sources of 20 batches of 1,024, by samples", "samples", count, mixture)
    for count in (10**4, 10**5) if quick else (10**4, 10**5, 10**6, 4 * 10**6):
        sizes = np.random.default_rng(1).lognormal(6, 1, count).astype(np.int64) + 1
        fit = lambda sizes=sizes: fit_documents(sizes, 2048)  # noqa: E731
        table.measure("best-fit packing, by documents", "documents", count, fit)


def checkpoints(table: Table, quick: bool, sizes: Sequence[float] = _GIGABYTES) -> None:
    """Bytes of a checkpoint, one process; and the number of checkpoints that are listed.

    A checkpoint takes its size in memory, and in a temporary folder.
    """
    with tempfile.TemporaryDirectory() as folder, joined_run("cpu") as runtime:
        for gigabytes in (0.1, 0.2) if quick else sizes:
            _checkpoint_of(table, Path(folder), gigabytes, runtime)
        recipe = tiny_recipe(Path(folder), layers=2)
        model = build_parallel(recipe, runtime, 1)
        store = CheckpointStore(Path(folder) / "many", 10_000)
        saved = 0
        for count in (10, 40) if quick else (10, 40, 160):
            for step in range(saved + 1, count + 1):
                store.save(step, collect(recipe.model, model.local_parameters), {"step": step, "tokens": step})
            saved = count
            listed = lambda: list_checkpoints(store.root)  # noqa: E731
            table.measure("hlat checkpoint list, by checkpoints", "checkpoints", count, listed)


def _checkpoint_of(table: Table, folder: Path, gigabytes: float, runtime: Any) -> None:
    width = int((gigabytes * 1e9 / 12 / (4 * 16)) ** 0.5) // 64 * 64  # 4 layers of 16 D^2, 12 bytes per parameter
    shape = {"layers": 4, "hidden_size": width, "intermediate_size": 4 * width, "heads": width // 64}
    recipe = tiny_recipe(folder, **shape, kv_heads=width // 64)
    model = build_parallel(recipe, runtime, 1)
    optimizer = build_optimizer(model.local_parameters, recipe.optimizer, "fp32", 1, model.matrices)
    for each in model.local_parameters:
        optimizer.init_state(each.parameter)
    store, size = CheckpointStore(folder / "large", 1), {}

    def timed(name: str, operation: Operation) -> Any:
        begin, computed = time.perf_counter(), time.process_time()
        result = operation()
        clock, spent = time.perf_counter() - begin, time.process_time() - computed
        size.setdefault("bytes", sum(file.stat().st_size for file in store.root.rglob("*") if file.is_file()))
        table.add(f"{name}, processor", "bytes", size["bytes"], spent)
        table.add(f"{name}, clock", "bytes", size["bytes"], clock)
        return result

    path = timed(
        "save a checkpoint", lambda: store.save(1, collect(recipe.model, model.local_parameters, optimizer), {})
    )
    timed("verify a checkpoint", lambda: verify_checkpoint(path))
    found = open_checkpoint(path)
    timed("load a checkpoint", lambda: restore(found, recipe.model, model.local_parameters, optimizer))
    table.measure("hlat checkpoint list, by bytes", "bytes", size["bytes"], lambda: list_checkpoints(store.root))
    shutil.rmtree(store.root)


def metrics(table: Table, quick: bool) -> None:
    """Lines of metrics.jsonl: at resume, in a list of runs, in a report; then lines of events.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        for count in (10**3, 10**4) if quick else (10**3, 10**4, 10**5, 10**6):
            run = Path(folder) / f"metrics-{count}"
            run.mkdir()
            _write_metrics(run / "metrics.jsonl", count)
            _write_events(run / "events.jsonl", 100)
            _measure_run(table, "lines of metrics", count, run)
            shutil.rmtree(run)
        for count in (10**3, 10**4) if quick else (10**3, 10**4, 10**5):
            run = Path(folder) / f"events-{count}"
            run.mkdir()
            _write_metrics(run / "metrics.jsonl", 100)
            _write_events(run / "events.jsonl", count)
            _measure_run(table, "events", count, run)
            shutil.rmtree(run)


def _measure_run(table: Table, size_name: str, count: int, run: Path) -> None:
    file = run / "metrics.jsonl"
    if size_name != "events":
        resume = lambda: MetricsFile(file, start_step=count).close()  # noqa: E731
        table.measure("resume: metrics are opened, by lines of metrics", size_name, count, resume)
        with _appending(file, count) as append:
            table.measure(
                "log 100 lines, by lines of metrics", size_name, count, lambda: [append() for _ in range(100)]
            )
        MetricsFile(file, start_step=count).close()
        table.measure("last line, by lines of metrics", size_name, count, lambda: read_last_metrics(file))
    table.measure(f"hlat runs, by {size_name}", size_name, count, lambda: list_runs(run))
    table.measure(f"hlat report, by {size_name}", size_name, count, lambda: report_page([run]), once=count > 10**5)


@contextmanager
def _appending(file: Path, count: int) -> Iterator[Operation]:
    metrics_file, steps = MetricsFile(file, start_step=count), itertools.count(count + 1)
    try:
        yield lambda: metrics_file.append(_line(next(steps)))
    finally:
        metrics_file.close()


def _line(step: int) -> dict[str, Any]:
    phases = ("data", "forward", "backward", "reduce", "optimizer", "between")
    return {
        "step": step,
        "tokens": step * 4096,
        "samples": step * 8,
        "batch_crc32": (step * 2654435761) % 2**32,
        "loss": 2.0 + 8.0 / (1 + step) + 0.01 * math.sin(step),
        "grad_norm": 1.0 + 0.1 * math.sin(3.0 * step),
        "param_norm": 100.0 + step * 1e-5,
        "lr": 3e-4,
        "tokens_per_second": 12345.678 + math.sin(step),
        "mfu": 0.41234567,
        "memory_bytes": 123456789,
        "seconds": {name: 0.01 * (1.0 + 0.1 * math.sin(step)) for name in phases},
    }


def _write_metrics(file: Path, count: int) -> None:
    with file.open("w", encoding="ascii") as out:
        out.writelines(json.dumps(_line(step)) + "\n" for step in range(1, count + 1))


def _write_events(file: Path, count: int) -> None:
    recipe = tiny_recipe(file.parent).model_dump(mode="json")
    with file.open("w", encoding="ascii") as out:
        begun = {"time": "2026-01-01T00:00:00+00:00", "event": "start", "step": 0, "recipe": recipe}
        out.write(json.dumps(begun) + "\n")
        for step in range(1, count):
            minute = f"2026-01-{1 + step // 1440 % 28:02}T{step // 60 % 24:02}:{step % 60:02}:00+00:00"
            event = {"time": minute, "event": "checkpoint", "step": step, "seconds": 1.5, "stall_seconds": 0.1}
            out.write(json.dumps(event) + "\n")


PARTS: dict[str, Callable[[Table, bool], None]] = {
    part.__name__: part for part in (layers, parameters, ranks, planning, samples, checkpoints, metrics)
}


def markdown(rows: Sequence[Row]) -> str:
    """The table of all rows."""
    lines = ["| operation | sizes | seconds | exponent, all | exponent, last two |", "|---|---|---|---:|---:|"]
    for row in rows:
        sizes, seconds = (", ".join(f"{value:.3g}" for value in values) for values in (row.sizes, row.seconds))
        lines.append(f"| {row.name} | {sizes} | {seconds} | {row.slope:.2f} | {row.last_slope:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few and small sizes, to try the script")
    parser.add_argument("--gigabytes", type=float, nargs="+", default=_GIGABYTES, help="sizes of checkpoints")
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for each other use processor time too
    record, table = Recorder(__file__, "scale.md"), Table(options.rounds)
    parts = PARTS | {"checkpoints": partial(checkpoints, sizes=options.gigabytes)}
    for name in options.only.split(","):
        print(name, flush=True)
        parts[name](table, options.quick)
    print(markdown(list(table.rows.values())))
    for row in table.rows.values():
        points = ", ".join(f"{size:.3g}: {spent:.3g} s" for size, spent in zip(row.sizes, row.seconds, strict=True))
        record.add(
            f"{row.name}: exponent of the last two sizes", "1", row.last_slope, note=f"{points}; all: {row.slope:.2f}"
        )
    default = options.only == parser.get_default("only")
    record.write(None if default else "-".join(["scale", *options.only.split(",")]))


if __name__ == "__main__":
    main()
