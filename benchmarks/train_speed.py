"""Training speed and peak memory beside transformers.

Trains the same 33.6 M-parameter model (width 512, 8 layers, 8 heads, 4 kv heads, ffn 1536, vocabulary 8192, sequence
512, batch 4) in hlat and in transformers.LlamaForCausalLM with torch's AdamW, in fp32 and under bf16 autocast.
Each of the four is a process of its own, so that peak memory is its own; rounds alternate between the two sides, and
the middle round of each is reported, so that a slow minute of the machine hits both.

    python benchmarks/train_speed.py [--rounds 3] [--steps 8] [--device cpu]
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

VOCABULARY, LAYERS, WIDTH, FFN, HEADS, KV_HEADS, LENGTH, BATCH = 8192, 8, 512, 1536, 8, 4, 512, 4
SIDES = ("hlat", "transformers")
MODES = ("fp32", "bf16")


def hlat_step(device, mode):
    """One step exactly as the training loop does it."""
    import numpy as np
    import torch

    from hlat.config import parse_recipe
    from hlat.data import Batch
    from hlat.optim import build_optimizer
    from hlat.parallel import build_parallel
    from hlat.runtime import Runtime
    from hlat.training.step import accumulate_gradients, update

    recipe = parse_recipe(
        {
            "model": {
                "vocab_size": VOCABULARY,
                "layers": LAYERS,
                "hidden_size": WIDTH,
                "intermediate_size": FFN,
                "heads": HEADS,
                "kv_heads": KV_HEADS,
            },
            "data": {"path": "unused", "sequence_length": LENGTH},
            "batch": {"global_batch": BATCH, "micro_batch": BATCH},
            "training": {"steps": 1000},
            "precision": {"mode": "mixed" if mode == "bf16" else "fp32"},
        }
    )
    model = build_parallel(recipe, Runtime(torch.device(device)), seed=0)
    optimizer = build_optimizer(model.parameters, recipe.optimizer)

    def step(number, tokens):
        batch = Batch(tokens[:, :-1], tokens[:, 1:], np.arange(BATCH), 0)
        loss = accumulate_gradients(model, batch)
        return update(model, optimizer, recipe, number, loss).loss

    return step, sum(p.numel() for p in model.parameters), torch


def transformers_step(device, mode):
    """The usual loop around LlamaForCausalLM: loss by labels, clip, fused AdamW, constant rate."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=LAYERS,
        hidden_size=WIDTH,
        intermediate_size=FFN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(number, tokens):
        inputs = tokens[:, :-1].to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=mode == "bf16"):
            loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step, sum(p.numel() for p in model.parameters()), torch


def worker(side, mode, steps, device_name):
    """Train and print tokens/s and peak memory as JSON."""
    import torch

    from hlat.runtime import peak_memory_bytes, synchronize

    device = torch.device(device_name)
    step, parameters, _ = {"hlat": hlat_step, "transformers": transformers_step}[side](device, mode)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator) for _ in range(steps + 2)]
    for number in (1, 2):  # allocators and kernels warm up
        step(number, batches[number - 1])
    synchronize(device)
    begin = time.perf_counter()
    for number in range(3, steps + 3):
        loss = step(number, batches[number - 1])
    synchronize(device)
    seconds = time.perf_counter() - begin
    print(
        json.dumps(
            {
                "tokens_per_second": steps * BATCH * LENGTH / seconds,
                "peak_memory": peak_memory_bytes(device),
                "parameters": parameters,
                "loss": float(loss),
            }
        )
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "MODE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(*arguments.worker, arguments.steps, arguments.device)
        return
    results = {(side, mode): [] for side in SIDES for mode in MODES}
    for _ in range(arguments.rounds):
        for mode in MODES:
            for side in SIDES:
                command = [sys.executable, __file__, "--steps", str(arguments.steps), "--device", arguments.device]
                output = subprocess.run(
                    [*command, "--worker", side, mode], check=True, capture_output=True, text=True
                ).stdout
                results[side, mode].append(json.loads(output.splitlines()[-1]))
    print(f"{'':14s}{'mode':6s}{'tokens/s':>10s}{'rounds':>24s}{'peak MiB':>10s}{'parameters':>13s}")
    middle = {}
    for (side, mode), rounds in results.items():
        rates = [r["tokens_per_second"] for r in rounds]
        memory = statistics.median(r["peak_memory"] for r in rounds) / 2**20
        middle[side, mode] = (statistics.median(rates), memory)
        spread = " ".join(f"{rate:,.0f}" for rate in rates)
        parameters = rounds[0]["parameters"]
        print(f"{side:14s}{mode:6s}{middle[side, mode][0]:10,.0f}{spread:>24s}{memory:10,.0f}{parameters:13,}")
    for mode in MODES:
        (ours, our_memory), (theirs, their_memory) = middle["hlat", mode], middle["transformers", mode]
        print(f"hlat / transformers, {mode}: speed {ours / theirs:.2f}, peak memory {our_memory / their_memory:.2f}")


if __name__ == "__main__":
    main()
