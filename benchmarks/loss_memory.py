"""Peak memory and time of the chunked loss and of the plain loss: a large vocabulary, a long sequence.

    hidden (tokens, width), head (vocabulary, width) -> loss, gradients by both

Each side is a process of its own. The memory reported is what loss and backward pass added to the peak resident memory.

    python benchmarks/loss_memory.py [--vocabulary 131072] [--tokens 8192] [--width 512] [--rounds 1]
"""

import argparse
import json
import subprocess
import sys
import time

from results import Recorder


def worker(side, vocabulary, tokens, width):
    """Compute one loss; print its bytes, seconds and value as JSON."""
    import torch
    import torch.nn.functional as F

    from hlat.model import CrossEntropy
    from hlat.model.loss import head_loss
    from hlat.runtime.backend import peak_memory_bytes

    torch.manual_seed(0)
    cpu = torch.device("cpu")
    hidden = torch.randn(1, tokens, width).requires_grad_()
    head = torch.randn(vocabulary, width).mul_(0.02).requires_grad_()
    labels = torch.randint(0, vocabulary, (1, tokens))
    hidden.grad, head.grad = torch.zeros_like(hidden), torch.zeros_like(head)
    before, begin = peak_memory_bytes(cpu), time.perf_counter()
    if side == "chunked":
        loss = head_loss(hidden, head, labels, CrossEntropy())
    else:
        loss = F.cross_entropy(F.linear(hidden, head).flatten(0, 1), labels.flatten(), reduction="sum")
    (loss / tokens).backward()
    seconds = time.perf_counter() - begin
    grown = peak_memory_bytes(cpu) - before
    print(json.dumps({"bytes": grown, "seconds": seconds, "loss": loss.item() / tokens}))


def main():
    """Print both sides, alternating, and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=131_072)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = (options.vocabulary, options.tokens, options.width)
    if options.worker:
        worker(options.worker, *sizes)
        return
    record, results = Recorder(__file__, "memory.md"), {"chunked": [], "plain": []}
    gib = 4 * sizes[0] * sizes[1] / 2**30
    print(f"vocabulary {sizes[0]:,}, {sizes[1]:,} tokens, width {sizes[2]}: logits {gib:.1f} GiB")
    print("| | peak added, MiB | seconds | loss |\n|---|---|---|---|")
    names = ("vocabulary", "tokens", "width")
    flags = [f"--{name}={size}" for name, size in zip(names, sizes, strict=True)]
    for _ in range(options.rounds):
        for side, rounds in results.items():
            command = [sys.executable, __file__, *flags, "--worker", side]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found = json.loads(done.stdout)
            rounds.append(found)
            print(f"| {side} | {found['bytes'] / 2**20:,.0f} | {found['seconds']:.1f} | {found['loss']:.6f} |")
    what = f"vocabulary {sizes[0]:,}, {sizes[1]:,} tokens, width {sizes[2]}, forward and backward"
    for claim, unit, field, scale in (
        ("peak memory added", "MiB", "bytes", 2**20),
        ("time of the loss", "s", "seconds", 1),
    ):
        ours, theirs = ([found[field] / scale for found in results[side]] for side in ("chunked", "plain"))
        record.add(f"{claim}, {what}", unit, ours, peer="torch, linear and cross_entropy", peer_values=theirs)
    record.write()


if __name__ == "__main__":
    main()
