"""A run of three stages equals a plain loop of transformers and torch.optim.AdamW in float64.

Short rows; other text, with a decay from the current rate; then four times the context on the first text, behind what
the first stage has read, with YaRN.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hlat.checkpoint.protocol.reader import open_checkpoint, resolve
from tests.support.training import plain_loop, whole_runs

pytest.importorskip("transformers", reason="the extra [hf] is not installed")

LENGTH, LONG, STEPS = 32, 128, 20  # of each stage
SIZES, LENGTHS = (4, 4, 2), (LENGTH, LENGTH, LONG)  # sequences of a step, by stage
PEAK, WARMUP, FLOOR = 4e-3, 5, 0.1
YARN = {"factor": 4.0, "beta_fast": 2.0, "beta_slow": 1.0}
ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": LENGTH, **YARN}
MODEL = {"vocab_size": 320, "layers": 2, "hidden_size": 32, "intermediate_size": 96, "heads": 4, "kv_heads": 2}
ADAMW = plain_loop.Training(
    steps=3 * STEPS, sequence_length=0, global_batch=0, micro_batch=2, seed=3, peak=PEAK, betas=(0.8, 0.9), eps=2e-3,
    weight_decay=0.3, decay_vectors=False, clip_norm=1.9, warmup=WARMUP, floor=FLOOR,
)  # fmt: skip


def rate(step: int) -> float:
    """Warm-up to the peak; then 1 - sqrt over the 40 steps of the other two stages, to a tenth of it."""
    if step <= STEPS:
        return PEAK * min(1.0, step / WARMUP)
    return PEAK * (1 - (1 - FLOOR) * math.sqrt((step - STEPS) / (2 * STEPS)))


def rows(folder: Path) -> list[list[np.ndarray]]:
    """Return the rows of each step, by the documented rule.

    Stages 1 and 3 read one text, in rows of other lengths. So stage 1 gets its first documents, at least 160 * 33
    tokens, and stage 3 all others.
    """
    tokens = [plain_loop.PreparedTokens(each).of("train") for each in (folder / "data", folder / "run" / "data-other")]
    starts = np.fromfile(folder / "data" / "train-documents.bin", dtype="<u8")
    needed = STEPS * SIZES[0] * (LENGTH + 1)
    border = int(starts[np.searchsorted(starts, needed)])
    texts = [tokens[0][:border], tokens[1], tokens[0][border:]]
    found = []
    for text, size, length in zip(texts, SIZES, LENGTHS, strict=True):
        n = (len(text) - 1) // length
        assert n >= STEPS * size, "no second epoch"
        first = [length * plain_loop.shuffled(ADAMW.seed, 0, sample, n) for sample in range(STEPS * size)]
        read = [text[start : start + length + 1] for start in first]
        found += [np.stack(read[step * size : (step + 1) * size]) for step in range(STEPS)]
    return found


def train_plainly(folder: Path, hf_folder: Path) -> dict[str, torch.Tensor]:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # noqa: PLC0415

    model = plain_loop.reference_model(hf_folder)
    optimizer = plain_loop.optimizer_of(ADAMW, model)
    for step, read in enumerate(rows(folder), start=1):
        if step == 2 * STEPS + 1:
            model.config.rope_parameters = dict(ROPE)
            model.model.rotary_emb = LlamaRotaryEmbedding(model.config).double()
        batch = torch.from_numpy(read)
        for part in batch.split(ADAMW.micro_batch):
            (plain_loop.nats(model, part) / batch[:, 1:].numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), ADAMW.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def recipe(folder: Path, hf_folder: Path, corpus: Path, world: int) -> dict[str, Any]:
    for name, documents in (("first", range(45)), ("other", range(45, 60))):
        (folder / name).mkdir()
        for number in documents:
            (folder / name / f"{number:03d}.txt").write_text((corpus / f"{number:03d}.txt").read_text())
    return {
        "run": {"dir": str(folder / "run"), "device": "cpu"},
        "model": {**MODEL, "norm_eps": 1e-5},
        "data": {
            "path": str(folder / "first"),
            "prepared_dir": str(folder / "data"),
            "sequence_length": LENGTH,
            "tokenizer": {"vocab_size": MODEL["vocab_size"]},
            "validation": {"fraction": 0.1},
            "workers": 1,
        },
        "batch": {"global_batch": SIZES[0], "micro_batch": ADAMW.micro_batch if world < 4 else 1},
        "optimizer": {name: getattr(ADAMW, name) for name in ("betas", "eps", "weight_decay", "clip_norm")}
        | {"lr": PEAK},
        "schedule": {"kind": "constant", "warmup_steps": WARMUP},
        "training": {"seed": ADAMW.seed},
        "evaluation": {"every_steps": None},
        "checkpoint": {"init_from": str(hf_folder), "every_steps": 25},
        "tracking": {"tensorboard": False, "console": "none"},
        "precision": {"mode": "fp32"},
        "stages": [
            {"name": "short", "steps": STEPS},
            {
                "name": "other",
                "steps": STEPS,
                "data": {"path": str(folder / "other")},
                "schedule": {"kind": "1-sqrt", "min_ratio": FLOOR},
            },
            {
                "name": "long",
                "steps": STEPS,
                "data": {"path": str(folder / "first"), "sequence_length": LONG},
                "batch": {"global_batch": SIZES[2], "micro_batch": 2 if world < 4 else 1},
                "model": {"rope": {"scaling": {"kind": "yarn", "original_max_position": LENGTH, **YARN}}},
                "parallel": {"tensor": min(world, 2), "pipeline": 2 if world == 4 else 1},
            },
        ],
    }


@pytest.mark.parametrize("world", [1, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 4))])
def test_weights_after_three_stages_equal_those_of_the_plain_loop(tmp_path, corpus, hf_folder, world):
    """To 1e-10: sixty steps of at most 12 sqrt(3328 * 2) u each, relative to weights that move by less than 0.2.

    The bound is that of test_witness.py: 60 * 12 * sqrt(6656) * 1.1e-16 is 6.5e-12.
    """
    whole_runs.train(recipe(tmp_path, hf_folder, corpus, world), world, tmp_path)
    found = open_checkpoint(resolve(tmp_path / "run")).load("model.")
    wanted = train_plainly(tmp_path, hf_folder)
    assert found.keys() == wanted.keys()
    for name, weights in wanted.items():
        assert float((found[name] - weights).abs().max()) <= 1e-10, name


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small LLaMA with random weights, saved by transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    config = LlamaConfig(
        vocab_size=MODEL["vocab_size"], num_hidden_layers=MODEL["layers"], hidden_size=MODEL["hidden_size"],
        intermediate_size=MODEL["intermediate_size"], num_attention_heads=MODEL["heads"],
        num_key_value_heads=MODEL["kv_heads"], rms_norm_eps=1e-5, rope_theta=10000.0, initializer_range=0.1,
        tie_word_embeddings=False, max_position_embeddings=LONG,
    )  # fmt: skip
    torch.manual_seed(11)
    folder = tmp_path_factory.mktemp("staged") / "hf"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
