"""Experiments of the HLAT paper that no other benchmark repeats: coalesced layers, accumulation, recomputation.

    coalescing     rehearsals of one rank: messages, bytes, FLOPs, products, with and without; then seconds of processor
                   time of a block of one tensor rank of eight, forward and backward, the two sides alternating
    gradients      distance of the gradient of a batch, as 1, 8 or 64 micro-batches, from that of fp32
    accumulation   a tiny model trained on TEXT, with batches of 1, 8 or 64 micro-batches, in each mode with each seed
    recomputation  HLAT's 7B as planned on 64 trn1.32xlarge with each policy (activation_memory.py measures policies)

    OMP_NUM_THREADS=1 python benchmarks/paper_experiments.py coalescing recomputation
    OMP_NUM_THREADS=1 python benchmarks/paper_experiments.py gradients accumulation --text input.txt [--steps 40]

Each experiment writes a record of its own. On a busy machine processor time tells more than the clock, and only ratios
of alternating turns are compared.
"""

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch

import hlat
from hlat.config import PRESETS
from hlat.config.load import parse_recipe
from hlat.config.sections.model import ModelConfig
from hlat.model import build
from hlat.precision import MODES as DTYPES
from hlat.rehearsal import PRODUCT, rehearse
from hlat.runtime.backend.cpu import keep_freed_memory
from results import Recorder

TENSOR = 8  # tensor ranks of HLAT's 7B
OLMO2_7B = {
    "architecture": "olmo2", "layers": 32, "hidden_size": 4096, "intermediate_size": 11008, "heads": 32,
    "vocab_size": 100352, "rope": {"theta": 500000.0}, "norm_eps": 1e-6, "max_sequence_length": 4096,
}  # config.json of allenai/OLMo-2-1124-7B  # fmt: skip
MODELS = ("llama-2-7b", "qwen3-8b", "olmo2-7b", "mistral-7b")
MODES = ("fp32", "mixed", "bf16-sr", "bf16")
ACCUMULATIONS = (1, 8, 64)
BATCH, SEQUENCE = 64, 32  # of the tiny model
TOKENS = 128  # in the timed products
RECIPE = {
    "run": {"device": "cpu"},
    "model": {"vocab_size": 65, "layers": 2, "hidden_size": 64, "intermediate_size": 176, "heads": 2},
    "data": {"path": "", "sequence_length": SEQUENCE, "tokenizer": {"train": "char"},
             "validation": {"fraction": 0.05, "by": "tail"}},
    "batch": {"global_batch": BATCH},
    "optimizer": {"lr": 4.0e-3},
    "schedule": {"warmup_steps": 10},
    "training": {"steps": 1},
    "evaluation": {"sequences": 256},
    "tracking": {"console": "none", "tensorboard": False},
}  # fmt: skip


def fields_of(name):
    """Model section of a model of about 7 B parameters."""
    return OLMO2_7B if name == "olmo2-7b" else PRESETS[name]


def counts(model, micro_batches=4):
    """Messages, their bytes, FLOPs and products of rank 0 of eight tensor ranks with two layers, in one step."""
    recipe = {
        "model": {**model, "layers": 2, "max_sequence_length": 4096},
        "data": {"path": "none", "sequence_length": 4096, "tokenizer": {"train": "char"}},
        "batch": {"global_batch": micro_batches, "micro_batch": 1},
        "parallel": {"tensor": TENSOR},
        "memory": {"activation_checkpointing": "selective"},
        "precision": {"mode": "bf16-sr"},
        "training": {"steps": 10},
    }
    rank = rehearse(parse_recipe(recipe, world=TENSOR), TENSOR, [0]).ranks[0]
    sent = sum(number * message.bytes for message, number in rank.messages.items())
    return sum(rank.messages.values()), sent, rank.flops, sum(event.kind == PRODUCT for event in rank.trace)


def block_of(name, mode, wide, coalesce):
    """A model of one block, with the shapes that one of eight tensor ranks has, or a sixteenth of every dimension."""
    whole = ModelConfig(**fields_of(name))
    divisor = TENSOR if wide else 16
    sizes = {"heads": whole.heads, "kv_heads": whole.n_kv_heads, "intermediate_size": whole.intermediate_size}
    sizes = {field: max(1, size // divisor) for field, size in sizes.items()}
    width = whole.hidden_size if wide else whole.hidden_size // divisor
    more = {"layers": 1, "vocab_size": 256, "hidden_size": width, "head_dim": whole.n_head_dim, "coalesce": coalesce}
    config = whole.model_copy(update={**sizes, **more})
    model = build(config, device="cpu", seed=None, dtype=DTYPES[mode].weights)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    return model


def passes(model):
    """Two functions: forward and backward of the products that coalescing joins, and of the complete block."""
    attention, feed_forward = model.layers["0"].attention, model.layers["0"].feed_forward
    coalesced = model.config.coalesce
    layers = [getattr(attention, name) for name in (("qkv",) if coalesced else ("q", "k", "v"))]
    layers += [getattr(feed_forward, name) for name in (("gate_up",) if coalesced else ("gate", "up"))]
    dtype = layers[0].weight.dtype
    x = torch.randn(1, TOKENS, model.config.hidden_size, dtype=dtype, requires_grad=True)
    gradient, ids = torch.randn_like(x), torch.randint(0, 256, (1, TOKENS))

    def products():
        out = [layer(x) for layer in layers]
        torch.autograd.backward(out, [torch.ones_like(each) for each in out])

    return {"products": products, "block": lambda: model.hidden(ids).backward(gradient)}


def ratios_of(name, mode, wide, turns):
    """Processor time of the separate side relative to the coalesced one, by turn; and the least of each."""
    sides = {side: passes(block_of(name, mode, wide, side)) for side in (True, False)}
    for what in ("products", "block"):
        spent = {True: [], False: []}
        for turn in range(turns + 1):
            for side in (True, False) if turn % 2 else (False, True):
                begin = time.process_time()
                sides[side][what]()
                if turn:  # the first allocates
                    spent[side].append(1000 * (time.process_time() - begin))
        ratios = [separate / one for one, separate in zip(spent[True], spent[False], strict=True)]
        yield what, ratios, f"least ms {min(spent[False]):.2f} and {min(spent[True]):.2f}"


def coalescing(options):
    """Print and record what coalescing changes, and what it does not."""
    record = Recorder(__file__, "paper.md")
    print("| model | messages | GiB | TFLOPs | products, coalesced | separate |\n|---|---|---|---|---|---|")
    for name in options.models:
        one, other = (counts({**fields_of(name), "coalesce": side}) for side in (True, False))
        assert one[:3] == other[:3], f"{name}: coalescing changed messages, bytes or FLOPs: {one}, {other}"
        print(f"| {name} | {one[0]} | {one[1] / 2**30:.2f} | {one[2] / 1e12:.2f} | {one[3]} | {other[3]} |", flush=True)
        what = f"of a step of two layers of {name}, tensor 8, 4 micro-batches, coalesced"
        note = f"messages {one[0]}, bytes {one[1]:,} and FLOPs {one[2]:,} are the same"
        record.add(f"products {what}", "1", one[3], peer="separate", peer_values=other[3], note=note)
    keep_freed_memory()  # as a run does
    print(f"\n{TOKENS} tokens, separate / coalesced, middle half\n| model | shapes | mode | products | block |")
    print("|---|---|---|---|---|")
    for name, mode, wide in product(options.models, options.modes, (True, False)):
        shapes, cells = "a rank of 8" if wide else "a sixteenth", []
        for what, ratios, least in ratios_of(name, mode, wide, options.turns if wide else 4 * options.turns):
            low, middle, high = statistics.quantiles(ratios, n=4)
            cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
            claim = f"processor time of separate / coalesced {what}: {name}, {shapes}, {TOKENS} tokens, {mode}"
            record.add(claim, "1", ratios, note=f"middle half {low:.3f} to {high:.3f}; {least}")
        print(f"| {name} | {shapes} | {mode} | {' | '.join(cells)} |", flush=True)
    record.write("paper_coalescing")


def final_loss(text, folder, steps, mode, accumulation, seed):
    """Validation loss after a short training."""
    overrides = {
        "run.dir": f"{folder}/{mode}-{accumulation}-{seed}",
        "data.path": str(text),
        "data.prepared_dir": f"{folder}/data",
        "batch.micro_batch": BATCH // accumulation,
        "precision.mode": mode,
        "training.seed": seed,
        "training.steps": steps,
        "evaluation.every_steps": steps,
    }
    return hlat.train(hlat.load_recipe(RECIPE, overrides)).validation_loss


def gradients(options):
    """Print and record how far the gradient of a batch is from that of fp32 with the same weights."""
    record, characters = Recorder(__file__, "paper.md"), sorted(set(text := options.text.read_text(encoding="utf-8")))
    ids = torch.tensor([characters.index(each) for each in text[: BATCH * (SEQUENCE + 1)]]).view(BATCH, -1)
    print("| mode | micro-batches | distance of the gradient from fp32's |\n|---|---|---|")
    exact = None
    for mode, count in product(MODES[:3], ACCUMULATIONS):
        model = build(ModelConfig(**RECIPE["model"]), device="cpu", seed=0, dtype=torch.bfloat16)
        model.to(DTYPES[mode].weights).compute = DTYPES[mode].compute
        for part in ids.chunk(count):
            (model(part[:, :-1], part[:, 1:]) / ids.numel()).backward()  # a sum over tokens
        found = torch.cat([each.grad.double().flatten() for each in model.parameters()])
        exact = found if exact is None else exact
        distance = float((found - exact).norm() / exact.norm())
        print(f"| {mode} | {count} | {distance:.2e} |")
        claim = f"relative distance of a gradient summed over {count} micro-batches in {mode} from one pass in fp32"
        record.add(claim, "1", distance)
    record.write("paper_gradients")


def accumulation(options):
    """Print and record losses by precision and number of micro-batches."""
    record, losses = Recorder(__file__, "paper.md"), {}
    print(f"| mode | micro-batches | {' | '.join(f'seed {seed}' for seed in options.seeds)} | minus fp32, same seed |")
    print("|---|---|" + "---|" * (len(options.seeds) + 1))
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(options.at_once, get_context("spawn")) as pool:
        train = partial(final_loss, options.text, folder, options.steps)
        assert train("fp32", 1, options.seeds[0]) > 0, "prepares the data, before processes share it"
        runs = {(mode, count): [pool.submit(train, mode, count, seed) for seed in options.seeds]
                for count in ACCUMULATIONS for mode in MODES}  # fmt: skip
        for (mode, count), pending in runs.items():
            ends = losses[mode, count] = [each.result() for each in pending]
            gaps = [end - other for end, other in zip(ends, losses["fp32", count], strict=True)]
            shown = " | ".join(f"{end:.4f}" for end in ends)
            print(f"| {mode} | {count} | {shown} | {', '.join(f'{gap:+.4f}' for gap in gaps)} |", flush=True)
            claim = f"validation loss of a tiny model, {options.steps} steps of {count} micro-batches in {mode}"
            record.add(claim, "nats", ends, peer=f"fp32, {count} micro-batches", peer_values=losses["fp32", count])
    record.write("paper_accumulation")


def recomputation(_):
    """Print and record the plan of HLAT's 7B with each policy."""
    record = Recorder(__file__, "paper.md")
    print("| policy | activations, GiB | device, GiB | executed TFLOPs | step, s | relative to none |")
    print("|---|---|---|---|---|---|")
    first = None
    for policy in ("none", "selective", "full"):
        layout = f"tp={TENSOR},zero=0,mbs=1,ckpt={policy}"
        chosen = hlat.plan("hlat-7b", "trn1.32xlarge:64", layout=layout).to_dict()["chosen"]
        first = first or chosen["step_seconds"]
        activations, flops = chosen["memory_parts_gib"]["0"]["activations"], chosen["executed_tflop_per_step"]["0"]
        ratio = chosen["step_seconds"] / first
        print(f"| {policy} | {activations:.2f} | {chosen['memory_gib']:.2f} | {flops:.1f} | "
              f"{chosen['step_seconds']:.2f} | {ratio:.3f} |")  # fmt: skip
        note = f"{chosen['step_seconds']:.2f} s; activations {activations:.2f}, device {chosen['memory_gib']:.2f} GiB"
        record.add(f"planned step of hlat-7b on 64 trn1.32xlarge, {policy}, relative to none", "1", ratio, note=note)
    record.write("paper_recomputation")


EXPERIMENTS = {each.__name__: each for each in (coalescing, gradients, accumulation, recomputation)}


def main():
    """Run the named experiments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="+", choices=EXPERIMENTS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--modes", nargs="+", choices=MODES[:3], default=("bf16-sr", "fp32"), help="of the products")
    parser.add_argument("--turns", type=int, default=7, help="of wide products; four times as many of narrow ones")
    parser.add_argument("--text", type=Path, help="tiny Shakespeare, for gradients and accumulation")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=2, help="trainings at a time, of one thread each")
    options = parser.parse_args()
    for name in options.experiments:
        EXPERIMENTS[name](options)


if __name__ == "__main__":
    main()
