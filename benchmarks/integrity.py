"""Cost of comparing replicas: speed of the tensor hash, of a copy and of sha256, and their share of a step.

The hash is taken of the weights and moments of the 33.6 M-parameter LLaMA of ``benchmarks/train_speed.py``, as stored
on a rank of plain data parallelism (12 bytes per parameter, without the gradient). All sides alternate in one process,
and the median round of each is reported. GB/s are the bytes read over the time; a copy also writes as many bytes.
The step is one forward and backward pass and update of the same model over ``--tokens`` tokens.

    python benchmarks/integrity.py [--rounds 9] [--layers 8] [--tokens 2048] [--device cuda]
"""

import argparse
import hashlib
import itertools
import statistics
import time

import torch

from hlat.config.load import parse_recipe
from hlat.data.samples.training_data import Batch
from hlat.optim import build_optimizer
from hlat.parallel import build_parallel
from hlat.resilience.replica_check import digest
from hlat.runtime.backend.device import synchronize
from hlat.runtime.distributed.join import Runtime
from hlat.training import accumulate_gradients, update
from results import Recorder

LENGTH = 256
WIDTH = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "heads": 8, "kv_heads": 4}


def trained(options, device):
    """Build the model and its optimizer, do a step, and return them with a function that does another step."""
    rows = options.tokens // LENGTH
    content = {
        "model": {**WIDTH, "layers": options.layers},
        "data": {"path": "none", "sequence_length": LENGTH, "tokenizer": {"train": "char"}},
        "batch": {"global_batch": rows, "micro_batch": rows},
        "training": {"steps": 100},
        "precision": {"mode": "fp32"},
    }
    recipe = parse_recipe(content)
    model = build_parallel(recipe, Runtime(device), seed=1)
    optimizer = build_optimizer(model.local_parameters, recipe.optimizer)
    tokens = torch.randint(0, WIDTH["vocab_size"], (rows, LENGTH + 1))
    batch = Batch(tokens[:, :-1], tokens[:, 1:].contiguous(), torch.arange(rows).numpy(), 0)

    def step():
        update(model, optimizer, recipe, 1, accumulate_gradients(model, batch))

    step()
    return model, optimizer, step


def timed(action, device):
    """Seconds of a call."""
    synchronize(device)
    began = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - began


def measure(sides, rounds, device):
    """Seconds of each call by side; the sides alternate, and a first round is not counted."""
    times = {name: [] for name in sides}
    for number, (name, action) in itertools.product(range(rounds + 1), sides.items()):
        seconds = timed(action, device)
        if number:
            times[name].append(seconds)
    return times


def main():
    """Print and record the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    device, record = torch.device(options.device), Recorder(__file__, "recovery.md", device=options.device)
    model, optimizer, step = trained(options, device)
    states = optimizer.state_tensors(model.local_parameters)
    tensors = [local.tensor for local in model.local_parameters] + [
        tensor for values in states.values() for tensor in values
    ]
    targets = [torch.empty_like(tensor) for tensor in tensors]
    size = sum(tensor.nbytes for tensor in tensors)
    sides = {
        "digest": lambda: torch.stack([digest(tensor) for tensor in tensors]).tolist(),
        "copy": lambda: [target.copy_(tensor) for target, tensor in zip(targets, tensors, strict=True)],
        "sha256": lambda: [hashlib.sha256(tensor.cpu().numpy()).digest() for tensor in tensors],
        f"step of {options.tokens:,} tokens": step,
    }
    times = measure(sides, options.rounds, device)
    middle = {name: statistics.median(values) for name, values in times.items()}
    print(f"{len(tensors)} tensors, {size / 1e6:.0f} MB on {device}, {torch.get_num_threads()} threads\n")
    print("| | ms | GB/s | share of a step |\n|---|---|---|---|")
    seconds_of_step = list(middle.values())[-1]
    for name, seconds in middle.items():
        speed = f"{size / seconds / 1e9:.1f}" if not name.startswith("step") else ""
        print(f"| {name} | {1e3 * seconds:.1f} | {speed} | {seconds / seconds_of_step:.1%} |")
    rates = {name: [size / seconds / 1e9 for seconds in rounds] for name, rounds in list(times.items())[:-1]}
    share = f"{middle['digest'] / seconds_of_step:.1%} of a step of {options.tokens:,} tokens"
    for peer in ("copy", "sha256"):
        what = f"tensor hash of {size / 1e6:.0f} MB of weights and moments"
        record.add(what, "GB/s", rates["digest"], peer=peer, peer_values=rates[peer], note=share)
    record.write()


if __name__ == "__main__":
    main()
