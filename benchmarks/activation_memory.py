"""Activation checkpointing: bytes per layer compared with Korthikanti et al. 2022, and seconds of each policy.

The bytes of a layer are those of all storages alive after a forward pass with two layers, less those with one layer.
Seconds are of forward and backward passes; the policies alternate in one process. The peer is torch's own
checkpointing: ``checkpoint`` of complete blocks, and its selective form, which saves matrix products.

    python benchmarks/activation_memory.py [--mode bf16-sr] [--sequence 1024] [--width 1024] [--turns 5] [--threads 2]
"""

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path

from results import Recorder

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of tests/

LAYERS = 4
BATCH = 1
OURS = ("none", "selective", "full")
TORCH = ("torch, products saved", "torch, whole blocks")


def config_of(width, layers=LAYERS):
    """LLaMA's proportions: heads of 64, a kv head for four of them, 8 / 3 of the width inside, in multiples of 64."""
    from hlat.config.sections.model import ModelConfig

    inner = -(-8 * width // 3 // 64) * 64
    heads = width // 64
    return ModelConfig(
        vocab_size=1024,
        layers=layers,
        hidden_size=width,
        intermediate_size=inner,
        heads=heads,
        kv_heads=max(1, heads // 4),
    )


def build(config, mode, policy):
    """A model that follows one of our policies or one of torch's."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    from hlat.activation_checkpointing import POLICIES, checkpoint_activations
    from hlat.activation_checkpointing.plan import ActivationPlan
    from hlat.model import build as build_model
    from hlat.precision import MODES

    model = build_model(config, device="cpu", seed=1, dtype=MODES[mode].weights)
    model.compute = MODES[mode].compute
    if policy in POLICIES:
        checkpoint_activations(model, ActivationPlan(policy, (POLICIES[policy],) * config.layers, 0, 1, 0))
        return model
    saved = partial(create_selective_checkpoint_contexts, products_saved)
    more = {"context_fn": saved} if policy == TORCH[0] else {}
    for block in model.blocks():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **more)
    return model


def products_saved(context, operation, *_, **__):
    """Torch's selective checkpointing, as its documentation and torchtitan use it."""
    import torch
    from torch.utils.checkpoint import CheckpointPolicy

    product = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


def tokens_of(config, sequence):
    """(B, S) ids."""
    import torch

    return torch.randint(0, config.vocab_size, (BATCH, sequence), generator=torch.Generator().manual_seed(0))


def alive(width, layers, mode, policy, sequence):
    """Bytes alive after a forward pass."""
    from tests.support.storages import Allocated

    config = config_of(width, layers)
    model, ids = build(config, mode, policy), tokens_of(config, sequence)
    model(ids, ids).backward()  # tables and gradients
    with Allocated() as allocated:
        loss = model(ids, ids)
    return allocated.alive([loss, ids, *model.parameters()])


def memory(record, width, mode, sequence):
    """Print and record the bytes per layer."""
    from hlat.activation_checkpointing import POLICIES
    from hlat.model.activations import activation_bytes
    from hlat.precision import MODES

    config, item = config_of(width), MODES[mode].compute.itemsize
    sbh = sequence * BATCH * width * item / 2  # their unit, of 16 bits
    scores = 5 * config.heads * sequence / width
    theirs = {"none": 34 + scores, "selective": 34.0, "full": 2.0}
    print("| policy | measured, bytes per layer | counted | in s b h | Korthikanti et al., in s b h |")
    print("|---|---|---|---|---|")
    for policy in (*OURS, *TORCH):
        measured = alive(width, 2, mode, policy, sequence) - alive(width, 1, mode, policy, sequence)
        counted = activation_bytes(config, BATCH, sequence, mode, POLICIES.get(policy, ())).per_layer
        formula = f"{theirs[policy]:.1f}" if policy in theirs else ""
        print(f"| {policy} | {measured:,} | {f'{counted:,}' if policy in OURS else ''} | "
              f"{measured / sbh:.2f} | {formula} |")  # fmt: skip
        peer = {"peer": "Korthikanti et al. 2022, Table 2", "peer_values": theirs[policy]} if policy in theirs else {}
        claim = f"activation bytes per layer, width {width}, {sequence} tokens, {mode}, policy {policy}"
        record.add(claim, "s b h", measured / sbh, note=f"{measured:,} bytes", **peer)
    by_tensor(config, mode, sequence, sbh)
    shared(config, mode, sequence, sbh)


def by_tensor(config, mode, sequence, sbh):
    """Print the difference by tensor: the terms of section 4.1 of the paper and our tensors."""
    from hlat.model.activations import activation_bytes

    layer = activation_bytes(config, BATCH, sequence, mode).layer
    scores = 5 * config.heads * sequence / config.hidden_size
    rows = (
        ("inputs of the norms", ("x", "residual"), 4, ""),
        ("scales of the norms", ("attention_norm_scale", "feed_forward_norm_scale"), 0, "fp32; they neglect them"),
        ("input of q, k, v", ("attention_input",), 2, ""),
        ("q, k, v", ("q", "k", "v"), 6, "grouped queries: fewer keys and values"),
        ("scores, softmax, dropout", (), scores, "fused attention keeps none of s x s"),
        ("log-sums of attention", ("attention_log_sum",), 0, "instead, in fp32"),
        ("input of the output projection", ("attention_output",), 2, "and output of fused attention"),
        ("input of the feed-forward layer", ("feed_forward_input",), 2, ""),
        ("inside of it", ("gate_up", "inner"), 16, "SwiGLU: three of 8 / 3 the width for GELU's two of 4"),
        ("dropout masks", (), 2, "no dropout"),
        (
            "narrow copies of weights",
            tuple(n for n in layer if "copy" in n),
            0,
            "where fp32 weights are multiplied in bf16",
        ),
    )
    print("\n| tensors, keeping everything | in s b h | theirs | why |\n|---|---|---|---|")
    for what, names, theirs, why in rows:
        print(f"| {what} | {sum(layer.get(name, 0) for name in names) / sbh:.2f} | {theirs:.1f} | {why} |")


def shared(config, mode, sequence, sbh):
    """Print the counted bytes of a rank under tensor parallelism with sequence parallelism."""
    from hlat.activation_checkpointing import POLICIES
    from hlat.model import ModelShard
    from hlat.model.activations import RankWorkload, activation_bytes

    print("\n| tensor + sequence | none | selective | and inputs gathered again | full | theirs: none | selective |")
    print("|---|---|---|---|---|---|---|")
    inputs = {"attention_input", "feed_forward_input"}
    ranks = [t for t in (1, 2, 4, 8) if config.kv_heads % t == 0 and config.intermediate_size % t == 0]
    for count in ranks:
        share = RankWorkload(ModelShard(tensor_count=count), sequence=count > 1)
        choices = ((), POLICIES["selective"], POLICIES["selective"] | inputs, POLICIES["full"])
        cells = [
            activation_bytes(config, BATCH, sequence, mode, recomputed, share).per_layer / sbh for recomputed in choices
        ]
        theirs = (34 / count + 5 * config.heads * sequence / config.hidden_size / count, 34 / count)
        print(f"| {count} | " + " | ".join(f"{cell:.2f}" for cell in (*cells, *theirs)) + " |")


def speed(record, width, mode, sequence, turns):
    """Print and record the seconds."""
    config = config_of(width)
    models = {policy: build(config, mode, policy) for policy in (*OURS, *TORCH)}
    ids, seconds = tokens_of(config, sequence), {policy: [] for policy in models}
    for turn in range(turns + 1):
        for policy, model in models.items():
            begin = time.perf_counter()
            model(ids, ids).backward()
            if turn:  # the first makes tables and gradients
                seconds[policy].append(time.perf_counter() - begin)
            model.zero_grad(set_to_none=True)
    print("\n| policy | seconds of forward and backward, median | least | relative to none, median of turns |")
    print("|---|---|---|---|")
    for policy, found in seconds.items():
        ratios = [a / b for a, b in zip(found, seconds["none"], strict=True)]
        print(f"| {policy} | {statistics.median(found):.3f} | {min(found):.3f} | {statistics.median(ratios):.3f} |")
        if policy != "none":
            record.add(f"time of forward and backward with policy {policy}, {mode}, relative to none", "1", ratios)
    print(
        f"\nmore FLOPs than none: {', '.join(f'{name} {share:.1%}' for name, share in extra(config, sequence).items())}"
    )


def extra(config, sequence):
    """FLOPs of the recomputation as a share of a forward and a backward pass."""
    from hlat.model.counts import count_parameters, flops_per_token

    whole = flops_per_token(config, sequence)
    attention = 2 * config.layers * config.heads * config.n_head_dim * (sequence + 1)
    inside = 2 * (count_parameters(config).matmul - config.vocab_size * config.hidden_size)
    down = 2 * config.layers * config.intermediate_size * config.hidden_size
    return {"selective": attention / whole, "full": (attention + inside - down) / whole}


def main():
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", default="bf16-sr", help="precision of the table of bytes")
    parser.add_argument("--timed-mode", default="fp32", help="precision of the table of seconds")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    print(f"{LAYERS} layers, width {options.width}, {BATCH} x {options.sequence} tokens, {options.mode}\n")
    record = Recorder(__file__, "memory.md")
    memory(record, options.width, options.mode, options.sequence)
    print(f"\n{options.timed_mode}, {options.threads} threads, torch {torch.__version__}")
    speed(record, options.width, options.timed_mode, options.sequence, options.turns)
    record.write()


if __name__ == "__main__":
    main()
