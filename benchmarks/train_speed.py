"""Training speed and peak memory of hlat, transformers and torchtitan.

Trains the same 33.6 M-parameter model (width 512, 8 layers, 8 heads, 4 kv heads, ffn 1536, vocabulary 8192, sequence
512, batch 4) in hlat and in transformers.LlamaForCausalLM with torch's AdamW, each eager and compiled, in fp32 and in
bf16 (mixed in hlat, autocast in transformers), and hlat in bf16-sr. Each is a process of its own, so that peak memory
is its own; rounds alternate between the sides, and the median round of each is reported, so that a slow minute of the
machine affects all. Tokens per processor second count the time of all threads: neighbours of a busy machine do not
change them much. MFU is the share of the matrix-product rate measured in the same process. Where bf16 is emulated
product by product (a CPU without bf16 instructions), transformers' bf16 is left out: a step takes minutes.

torchtitan takes part if a checkout of it is named (torchtitan_training.py says which): in fp32, in its mixed
precision, and with weights in bf16 beside hlat's bf16-sr.

    python benchmarks/train_speed.py [--rounds 3] [--steps 8] [--device cpu] [--sides SIDES] [--torchtitan CHECKOUT]
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

from results import Recorder
from torchtitan_training import torchtitan_step

VOCABULARY, LAYERS, WIDTH, FFN, HEADS, KV_HEADS, LENGTH, BATCH = 8192, 8, 512, 1536, 8, 4, 512, 4
MODES = {"fp32": "fp32", "bf16": "mixed", "bf16-sr": "bf16-sr"}
PEERS = ("transformers", "torchtitan")
SIDES = tuple(f"{name}{how}" for name in ("hlat", *PEERS) for how in ("", " compiled"))
WARM_UP = 2


def hlat_step(device, mode, compiled):
    """One step exactly as the training loop does it."""
    import numpy as np
    import torch

    from hlat.config.load import parse_recipe
    from hlat.data.samples.training_data import Batch
    from hlat.optim import build_optimizer
    from hlat.parallel import build_parallel
    from hlat.runtime.distributed.join import Runtime
    from hlat.training import accumulate_gradients, update

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
            "precision": {"mode": MODES[mode]},
            "run": {"compile": "blocks" if compiled else "none"},
        }
    )
    model = build_parallel(recipe, Runtime(torch.device(device)), seed=0)
    optimizer = build_optimizer(model.local_parameters, recipe.optimizer, MODES[mode])

    def step(number, tokens):
        batch = Batch(tokens[:, :-1], tokens[:, 1:], np.arange(BATCH), 0)
        loss = accumulate_gradients(model, batch)
        return update(model, optimizer, recipe, number, loss).loss

    return step, sum(p.numel() for p in model.parameters), torch


def transformers_step(device, mode, compiled):
    """One step of the usual loop around LlamaForCausalLM: loss by labels, clip, fused AdamW, constant rate."""
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
    if compiled:
        model.compile()
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


def build(side, device, mode, checkout):
    """Build a side; return its step and its number of parameters."""
    compiled = side.endswith("compiled")
    if side.startswith("torchtitan"):
        shape = {"vocabulary": VOCABULARY, "layers": LAYERS, "width": WIDTH, "ffn": FFN}
        shape |= {"heads": HEADS, "kv_heads": KV_HEADS, "length": LENGTH, "batch": BATCH}
        return torchtitan_step(checkout, mode, compiled, **shape)
    make = hlat_step if side.startswith("hlat") else transformers_step
    return make(device, mode, compiled)[:2]


def worker(side, mode, steps, device_name, checkout):
    """Train and print tokens/s and peak memory as JSON."""
    import torch

    from hlat.config.sections.model import ModelConfig
    from hlat.hardware import peak_flops
    from hlat.model.counts import flops_per_token
    from hlat.runtime.backend.device import peak_memory_bytes, synchronize

    device = torch.device(device_name)
    begin = time.perf_counter()
    step, parameters = build(side, device, mode, checkout)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator) for _ in range(steps + WARM_UP)]
    for number in range(1, WARM_UP + 1):  # allocators and kernels warm up, compilers compile
        step(number, batches[number - 1])
    synchronize(device)
    start_up, begin, busy = time.perf_counter() - begin, time.perf_counter(), time.process_time()
    for number in range(WARM_UP + 1, steps + WARM_UP + 1):
        loss = step(number, batches[number - 1])
    synchronize(device)
    seconds, busy = time.perf_counter() - begin, time.process_time() - busy
    memory, rate = peak_memory_bytes(device), steps * BATCH * LENGTH / seconds
    shape = {"hidden_size": WIDTH, "intermediate_size": FFN, "heads": HEADS, "kv_heads": KV_HEADS}
    config = ModelConfig(vocab_size=VOCABULARY, layers=LAYERS, **shape)
    peak = peak_flops(device, torch.float32 if mode == "fp32" else torch.bfloat16).value
    print(
        json.dumps(
            {
                "tokens_per_second": rate,
                "tokens_per_processor_second": steps * BATCH * LENGTH / busy,
                "mfu": rate * flops_per_token(config, LENGTH) / peak,
                "start_up": start_up,
                "peak_memory": memory,
                "parameters": parameters,
                "loss": float(loss),
            }
        )
    )


def measured(side, mode, arguments):
    """Run one round of one side, in a process of its own."""
    command = [sys.executable, __file__, "--steps", str(arguments.steps), "--device", arguments.device]
    command += ["--torchtitan", arguments.torchtitan] if arguments.torchtitan else []
    done = subprocess.run([*command, "--worker", side, mode], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def sides_of(device_name, *, compiled, torchtitan):
    """Pairs (side, mode) that are measured on this device, with or without compiled blocks and torchtitan."""
    import torch

    from hlat.runtime.backend.device import has_fast_bf16

    fast = has_fast_bf16(torch.device(device_name))
    return [
        (side, mode)
        for mode in MODES
        for side in SIDES
        if (side.startswith("hlat") or mode == "fp32" or fast)
        and not (side.startswith("transformers") and mode == "bf16-sr")
        and (compiled or not side.endswith("compiled"))
        and (torchtitan or not side.startswith("torchtitan"))
    ]


def main():
    """Print a table and the ratios to transformers, and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--eager", action="store_true", help="leave out compiled blocks")
    parser.add_argument("--sides", help='only these, as "hlat,hlat compiled,torchtitan compiled"')
    parser.add_argument("--torchtitan", metavar="CHECKOUT", help="folder of torchtitan's repository")
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "MODE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(*arguments.worker, arguments.steps, arguments.device, arguments.torchtitan)
        return
    record = Recorder(__file__, "speed.md", packages=("transformers",), device=arguments.device)
    chosen = sides_of(arguments.device, compiled=not arguments.eager, torchtitan=arguments.torchtitan is not None)
    if arguments.sides:
        chosen = [key for key in chosen if key[0] in arguments.sides.split(",")]
    results = {key: [] for key in chosen}
    for _ in range(arguments.rounds):
        for key, rounds in results.items():
            rounds.append(measured(*key, arguments))
    print("| | mode | tokens/s | rounds | per processor s | MFU | peak MiB | start-up s |")
    print("|---|---|---|---|---|---|---|---|")
    middle = {}
    for (side, mode), rounds in results.items():
        names = ("tokens_per_second", "tokens_per_processor_second", "peak_memory", "mfu", "start_up")
        rate, busy, memory, mfu, start_up = (statistics.median(row[name] for row in rounds) for name in names)
        middle[side, mode] = (rate, busy, memory)
        spread = ", ".join(f"{row['tokens_per_second']:,.0f}" for row in rounds)
        cells = f"{rate:,.0f} | {spread} | {busy:,.0f} | {mfu:.0%} | {memory / 2**20:,.0f} | {start_up:.0f}"
        print(f"| {side} | {mode} | {cells} |")
    pairs = [
        (ours, theirs)
        for ours in results
        for theirs in results
        if ours[0].startswith("hlat") and theirs[0].startswith(PEERS) and ours[1] == theirs[1]
    ]
    # Like beside like; and hlat not compiled, which is its default on CPUs, beside peers that are.
    pairs = [(ours, theirs) for ours, theirs in pairs if ours[0] == "hlat" or theirs[0].endswith("compiled")]
    for ours, theirs in pairs:
        speed, by_processor, memory = (one / other for one, other in zip(middle[ours], middle[theirs], strict=True))
        ratios = f"speed {speed:.2f}, per processor second {by_processor:.2f}, peak memory {memory:.2f}"
        print(f"{ours[0]} / {theirs[0]}, {ours[1]}: {ratios}")
    alone = [(key, None) for key in results if key[0].startswith("hlat") and key not in dict(pairs)]
    write_record(record, results, pairs + alone)


def write_record(record, results, pairs):
    """Record speed and memory of hlat's sides, beside those of a peer unless it is None."""
    for ours, theirs in pairs:
        for what, unit, field, scale in (
            ("training speed", "tokens/s", "tokens_per_second", 1),
            ("training speed by processor time", "tokens/processor s", "tokens_per_processor_second", 1),
            ("peak memory", "MiB", "peak_memory", 2**20),
        ):
            values, others = ([row[field] / scale for row in results.get(key, [])] for key in (ours, theirs))
            peer = {"peer": f"{theirs[0]}, torch AdamW", "peer_values": others} if theirs else {}
            record.add(f"{what}, 33.6 M parameters, {MODES[ours[1]]}, {ours[0]}", unit, values, **peer)
    record.write()


if __name__ == "__main__":
    main()
