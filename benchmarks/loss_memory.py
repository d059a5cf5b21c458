"""Peak memory and time of the chunked loss and of the plain loss: a large vocabulary, a long sequence.

    hidden (tokens, width), head (vocabulary, width) -> loss, gradients by both

Each side is a process of its own. The memory reported is what loss and backward pass added to the peak resident memory.
With ``--earlier SRC`` (the folder src of an earlier version of hlat) the peer is its loss instead of the plain one; the
time is then that of the processor, which a busy machine changes less.

    python benchmarks/loss_memory.py [--vocabulary 131072] [--tokens 8192] [--width 512] [--rounds 1] [--bf16]
"""

import argparse
import json
import os
import subprocess
import sys
import time

from results import Recorder


def worker(side, vocabulary, tokens, width, dtype):
    """Compute one loss over fp32 weights; print its bytes, seconds and value as JSON."""
    import torch
    import torch.nn.functional as F

    from hlat.model import CrossEntropy
    from hlat.model.loss import head_loss
    from hlat.runtime.backend.device import peak_memory_bytes

    torch.manual_seed(0)
    cpu = torch.device("cpu")
    hidden = torch.randn(1, tokens, width).to(getattr(torch, dtype)).requires_grad_()
    head = torch.randn(vocabulary, width).mul_(0.02).requires_grad_()
    labels = torch.randint(0, vocabulary, (1, tokens))
    hidden.grad, head.grad = torch.zeros_like(hidden), torch.zeros_like(head)
    before, begin, begin_cpu = peak_memory_bytes(cpu), time.perf_counter(), time.process_time()
    if side != "plain":
        loss = head_loss(hidden, head, labels, CrossEntropy())
    else:
        logits = F.linear(hidden, head.to(hidden.dtype))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    (loss / tokens).backward()
    found = {"seconds": time.perf_counter() - begin, "processor seconds": time.process_time() - begin_cpu}
    found |= {"bytes": peak_memory_bytes(cpu) - before, "loss": loss.item() / tokens}
    print(json.dumps(found))


def main():
    """Print both sides, alternating, and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=131_072)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--bf16", action="store_true", help="hidden states in bf16")
    parser.add_argument("--earlier", metavar="SRC", help="compare with the loss of an earlier version of hlat")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = (options.vocabulary, options.tokens, options.width)
    dtype = "bfloat16" if options.bf16 else "float32"
    if options.worker:
        worker(options.worker, *sizes, dtype)
        return
    peer = "earlier" if options.earlier else "plain"
    time_field = "processor seconds" if options.earlier else "seconds"
    record, results = Recorder(__file__, "memory.md"), {"chunked": [], peer: []}
    gib = 4 * sizes[0] * sizes[1] / 2**30
    print(f"vocabulary {sizes[0]:,}, {sizes[1]:,} tokens, width {sizes[2]}: logits {gib:.1f} GiB")
    print("| | peak added, MiB | seconds | loss |\n|---|---|---|---|")
    names = ("vocabulary", "tokens", "width")
    flags = [f"--{name}={size}" for name, size in zip(names, sizes, strict=True)] + ["--bf16"] * options.bf16
    for _ in range(options.rounds):
        for side, rounds in results.items():
            command = [sys.executable, __file__, *flags, "--worker", side]
            env = os.environ | ({"PYTHONPATH": options.earlier} if side == "earlier" else {})
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
            found = json.loads(done.stdout)
            rounds.append(found)
            print(f"| {side} | {found['bytes'] / 2**20:,.0f} | {found[time_field]:.1f} | {found['loss']:.6f} |")
    what = f"vocabulary {sizes[0]:,}, {sizes[1]:,} tokens, width {sizes[2]}, {dtype}, forward and backward"
    peer_name = "hlat before: chunks of 64 MiB or 256 tokens" if options.earlier else "torch, linear and cross_entropy"
    for claim, unit, field, scale in (
        ("peak memory added", "MiB", "bytes", 2**20),
        ("time of the loss", "s", time_field, 1),
    ):
        ours, theirs = ([found[field] / scale for found in results[side]] for side in ("chunked", peer))
        record.add(f"{claim}, {what}", unit, ours, peer=peer_name, peer_values=theirs)
    record.write(f"loss_memory-{sizes[0]}-{sizes[2]}" if options.earlier else "loss_memory")


if __name__ == "__main__":
    main()
