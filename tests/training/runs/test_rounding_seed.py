"""Stochastic rounding uses the seed of the run."""

import json
from pathlib import Path

import torch

from tests.support.same_runs import newest


def test_another_seed_rounds_with_other_random_bits(cli, recipe_file: Path, tiny: list[str], tmp_path: Path) -> None:
    """Initial weights and (unshuffled) data are the same, so the seed changes only the rounding."""
    brief = ["training.steps=1", "schedule.warmup_steps=0", "tracking.tensorboard=false"]
    short = [*tiny, *brief, f"data.prepared_dir={tmp_path / 'data'}"]
    first = cli("train", recipe_file, *short)
    assert first.returncode == 0, first.stderr

    def run(name: str, seed: int) -> tuple[dict[str, torch.Tensor], list[float]]:
        folder = tmp_path / name
        more = [f"run.dir={folder}", f"checkpoint.init_from={tmp_path / 'run'}", "data.shuffle=false"]
        done = cli("train", recipe_file, *short, *more, "precision.mode=bf16-sr", f"training.seed={seed}")
        assert done.returncode == 0, done.stderr
        [line] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return newest(folder).load("model."), [line[key] for key in ("batch_crc32", "loss", "grad_norm")]

    weights, numbers = run("one", 1)
    again, same = run("again", 1)
    other, equal = run("other", 2)
    assert numbers == same == equal, "until something is rounded nothing tells them apart"
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    differing = sum(int((weights[name] != other[name]).sum()) for name in weights)
    # An updated weight lies between two bf16 values. Averaged over its position there, other random bits round it the
    # other way with probability 1/3. A bound of 1/20 leaves room for embedding rows without a token.
    assert differing > sum(tensor.numel() for tensor in weights.values()) / 20
