"""Seconds that training waits for a checkpoint, and the speed of verifying one.

The same state of about 1 GB, weights and AdamW's moments of a 96 M-parameter LLaMA, is saved by ``torch.save``, by a
synchronous ``torch.distributed.checkpoint.save``, by hlat's store synchronously, and by hlat's saver process in the
background. They alternate in one process, so that a slow minute of the machine affects all; the median of the rounds is
reported. With several processes (ZeRO 3) each saves its shard, and a save ends when all have ended.

In the background, the time counted is that for which the loop waits: the copy of the state. If the next save is due at
once, it also waits for the write of the one before; both are printed. Steps are timed alone and while the saver writes.
``torch.save`` does not wait for the disk, the others do.

    python benchmarks/async_save.py [--nproc 1] [--rounds 5] [--layers 10] [--folder DIR] [--device cpu]
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from results import Recorder

WIDTH = {"vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2048, "heads": 12, "kv_heads": 12}
LENGTH = 128
STEPS = 2  # that are timed, alone and while the saver writes


class Run:
    """A small run in this process, and its state as each side wants it."""

    def __init__(self, runtime, process, folder, layers):
        from hlat.checkpoint.async_saver import AsyncSaver
        from hlat.checkpoint.protocol.store import CheckpointStore
        from hlat.config.load import parse_recipe
        from hlat.optim import build_optimizer
        from hlat.parallel import build_parallel

        content = {
            "model": {**WIDTH, "layers": layers},
            "data": {"path": "none", "sequence_length": LENGTH, "tokenizer": {"train": "char"}},
            "batch": {"global_batch": runtime.world, "micro_batch": 1},
            "optimizer": {"lr": 1e-4},
            "schedule": {"warmup_steps": 5},
            "training": {"steps": 100_000},
            "precision": {"mode": "fp32"},
            "parallel": {"zero": 3} if runtime.world > 1 else {},
        }
        self.runtime, self.folder, self.step = runtime, folder, 0
        self.recipe = parse_recipe(content, world=runtime.world)
        self.model = build_parallel(self.recipe, runtime, 1)
        self.optimizer = build_optimizer(self.model.local_parameters, self.recipe.optimizer)
        self.store = CheckpointStore(folder / "hlat", 1, ranks=runtime.ranks)
        self.saver = AsyncSaver(process, runtime, self.store, 0, None)
        self.train()
        self.saver.prepare(self.content().chunks)
        self.saver.agree_on_outcome()

    def train(self):
        """Do one step; return its seconds."""
        import torch

        from hlat.data.samples.training_data import Batch
        from hlat.runtime.backend.device import synchronize
        from hlat.training import accumulate_gradients, update

        self.step += 1
        tokens = torch.randint(0, WIDTH["vocab_size"], (1, LENGTH + 1))
        begin = time.perf_counter()
        loss = accumulate_gradients(self.model, Batch(tokens[:, :-1], tokens[:, 1:], None, 0))
        update(self.model, self.optimizer, self.recipe, self.step, loss)
        synchronize(self.runtime.device)
        return time.perf_counter() - begin

    def content(self):
        from hlat.checkpoint import collect
        from hlat.checkpoint.protocol.commit import CheckpointContent

        return CheckpointContent(
            self.step, collect(self.recipe.model, self.model.local_parameters, self.optimizer), {"step": self.step}, {}
        )

    def state(self):
        """Parameters and moments by name as torch has them: DTensors where they are sharded."""
        tensors = {f"model.{local.name}": local.parameter.detach() for local in self.model.local_parameters}
        for local in self.model.local_parameters:
            for name, tensor in self.optimizer.state[local.parameter].items():
                tensors[f"optimizer.{name}.{local.name}"] = tensor
        return tensors

    def timed(self, action):
        """Seconds until every rank is done."""
        self.runtime.ranks.barrier()
        begin = time.perf_counter()
        action()
        self.runtime.ranks.barrier()
        return time.perf_counter() - begin

    def torch_save(self):
        import torch

        local = {name: getattr(tensor, "to_local", lambda t=tensor: t)() for name, tensor in self.state().items()}
        torch.save(local, self.folder / f"torch-{self.runtime.rank}.pt")

    def dcp_save(self):
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state(), checkpoint_id=self.folder / "dcp", no_dist=self.runtime.world == 1)

    def store_save(self):
        content = self.content()
        self.store.save(content.step, content.chunks, content.meta)

    def save_in_background(self):
        """Save in the background: seconds of the copy, of the write, of a step meanwhile, and of all these steps."""
        copy = self.timed(lambda: self.saver.submit(self.content()))
        begin = time.perf_counter()
        steps = [self.train() for _ in range(STEPS)]
        wait = self.timed(lambda: list(self.saver.reports(wait=True)))
        gone_on = time.perf_counter() - begin - wait
        settled = self.saver.agree_on_outcome()
        assert settled.result is not None and settled.result.path is not None, settled
        return copy, settled.result.seconds, statistics.median(steps), gone_on

    def nbytes(self):
        """Bytes of the complete state, over all ranks."""
        return sum(self.runtime.ranks.all_gather(sum(block.nbytes for block in self.content().chunks)))


def measure(runtime, process, folder, rounds, layers):
    """Alternate between the sides; print and record on rank 0."""
    record = Recorder(__file__, "checkpoints.md", device=runtime.device.type) if runtime.rank == 0 else None
    run = Run(runtime, process, folder, layers)
    sides = {"torch.save": run.torch_save, "DCP, synchronous": run.dcp_save, "hlat, synchronous": run.store_save}
    times = {name: [] for name in sides}
    background, alone = [], []
    for _ in range(rounds + 1):  # the first is a warm-up
        alone.append(statistics.median(run.train() for _ in range(STEPS)))
        for name, save in sides.items():
            times[name].append(run.timed(save))
            runtime.ranks.run_on_rank0(lambda: shutil.rmtree(folder / "dcp", ignore_errors=True))
        background.append(run.save_in_background())
        run.store.prune()
    size = run.nbytes()
    if runtime.rank == 0:
        middle = {name: statistics.median(seconds[1:]) for name, seconds in times.items()}
        copy, write, step, _ = (statistics.median(column) for column in zip(*background[1:], strict=True))
        print_tables(runtime.world, size, middle, copy, background[0][0], write, statistics.median(alone[1:]), step)
        what = f"{size / 1e9:.2f} GB, {runtime.world} process{'es' if runtime.world > 1 else ''}"
        dcp = {"peer": "torch.distributed.checkpoint, synchronous", "peer_values": times["DCP, synchronous"][1:]}
        record.add(f"training waits for a background save of {what}", "s", [row[0] for row in background[1:]], **dcp)
        record.add(f"training waits for a synchronous save of {what}", "s", times["hlat, synchronous"][1:], **dcp)
        slower = [row[2] / each for row, each in zip(background[1:], alone[1:], strict=True)]
        record.add(f"time of a step while {what} are written, relative to a step alone", "1", slower)
        record.add(f"durable after the copy, {what}", "s", [row[1] for row in background[1:]])
        print_verify(run.store.root, record)
        record.write("async_save" if runtime.world == 1 else f"async_save-{runtime.world}-processes")


def print_tables(world, size, middle, copy, first, write, alone, step):
    """Print what was measured, as markdown."""
    reference = middle["DCP, synchronous"]
    print(f"\n{size / 1e9:.2f} GB of state, {world} process{'es' if world > 1 else ''}, {alone:.2f} s a step\n")
    print("| save | training stands still, s | of a synchronous DCP save | of a step |")
    print("|---|---|---|---|")
    rows = {**middle, "hlat, background": copy, "the same, the next save at once": write + copy}
    for name, seconds in rows.items():
        print(f"| {name} | {seconds:.2f} | {seconds / reference:.1%} | {seconds / alone:.0%} |")
    print(
        f"\nBeside training: the first copy took {first:.2f} s; it was durable {write:.2f} s after a copy; "
        f"a step took {step:.2f} s while it was written, {step / alone:.2f} times as long as alone."
    )


def print_verify(root, record):
    """Verify the last checkpoint, alternating with sha256sum of the same files; print and record the speeds."""
    from hlat.checkpoint.protocol.reader import verify_checkpoint

    [folder] = root.glob("step-*")
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    rates = {"hlat checkpoint verify": [], "sha256sum": []}
    for _ in range(5):
        begin = time.perf_counter()
        assert verify_checkpoint(folder) == []
        middle = time.perf_counter()
        subprocess.run(["sha256sum", *files], check=True, stdout=subprocess.DEVNULL)
        rates["hlat checkpoint verify"].append(size / (middle - begin) / 1e9)
        rates["sha256sum"].append(size / (time.perf_counter() - middle) / 1e9)
    print(f"\n| verifying {size / 1e9:.2f} GB in {len(files)} files, {os.cpu_count()} cores | GB/s |\n|---|---|")
    for name, values in rates.items():
        print(f"| {name} | {statistics.median(values):.2f} |")
    ours, theirs = rates.values()
    record.add("speed of hlat checkpoint verify", "GB/s", ours, peer="sha256sum of the same files", peer_values=theirs)


def work(arguments):
    """Run one rank."""
    from hlat.checkpoint.async_saver import run_saver
    from hlat.checkpoint.format.filesystem import Disk
    from hlat.runtime.distributed.join import joined_run
    from hlat.runtime.helper_process import start_helper
    from hlat.runtime.process import rank_info

    process = start_helper(partial(run_saver, rank_info=rank_info(), make_disk=Disk))
    with joined_run(arguments.device) as runtime:
        measure(runtime, process, Path(arguments.folder), arguments.rounds, arguments.layers)
    process.close()
    process.wait()


def main():
    """Measure in this process, or start several."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--folder", help="where the checkpoints go for a while; a temporary folder if not given")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the command has it
    if "RANK" in os.environ:
        work(arguments)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        arguments.folder = folder
        if arguments.nproc == 1:
            work(arguments)
            return
        options = [f"--{name}={getattr(arguments, name)}" for name in ("rounds", "layers", "folder", "device")]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.nproc}"]
        sys.exit(subprocess.run([sys.executable, *torchrun, __file__, *options], check=False).returncode)


if __name__ == "__main__":
    main()
