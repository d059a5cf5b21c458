"""A run equals a plain loop in float64 with transformers, torch.optim.AdamW and clip_grad_norm_, value by value."""

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch

from hlat.checkpoint import import_hf
from hlat.checkpoint.protocol.reader import open_checkpoint, resolve
from tests.support.training import plain_loop, whole_runs

pytest.importorskip("transformers", reason="the extra [hf] is not installed")

MODEL = {"vocab_size": 320, "layers": 2, "hidden_size": 32, "intermediate_size": 96, "heads": 4, "kv_heads": 2}
NUMBERS = plain_loop.Training(
    steps=20,
    sequence_length=64,
    global_batch=16,
    micro_batch=2,
    seed=3,
    peak=4e-3,
    betas=(0.8, 0.9),
    eps=2e-3,
    weight_decay=0.3,
    decay_vectors=False,
    clip_norm=1.9,
    warmup=5,
    floor=0.1,
)
VALIDATED = 7  # steps between two validations
TRAINING = ("data", "forward", "backward", "reduce", "optimizer", "device")


@dataclass(frozen=True)
class Case:
    """A run: number of ranks, layout, and differences from NUMBERS."""

    name: str
    world: int = 1
    parallel: dict[str, Any] | None = None
    decay_vectors: bool = False
    log_every: int = 1
    ramp: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("one process, vectors decayed", decay_vectors=True),
    Case("DP2, ZeRO 1", 2, {"zero": 1}),
    Case("TP2, a line every 3 steps", 2, {"tensor": 2}, log_every=3),
    # 4 steps of 4 sequences, 3 of 8, then 16: the tokens of a stage are rounded up to whole steps
    Case("DP2, ZeRO 1, a batch ramp", 2, {"zero": 1}, log_every=3, ramp=((900, 4), (1536, 8))),
]


@dataclass(frozen=True)
class Run:
    """Files of the hlat run, and the result of the plain loop."""

    case: Case
    lines: list[dict[str, Any]]
    phase_log: list[tuple[str, float]]
    weights: dict[str, torch.Tensor]
    witness: plain_loop.PlainLoopResult


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small LLaMA with random weights and random norms, saved by transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    config = LlamaConfig(
        vocab_size=MODEL["vocab_size"],
        num_hidden_layers=MODEL["layers"],
        hidden_size=MODEL["hidden_size"],
        intermediate_size=MODEL["intermediate_size"],
        num_attention_heads=MODEL["heads"],
        num_key_value_heads=MODEL["kv_heads"],
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        initializer_range=0.1,
        tie_word_embeddings=False,
        max_position_embeddings=NUMBERS.sequence_length,
    )
    torch.manual_seed(11)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    folder = tmp_path_factory.mktemp("witness") / "hf"
    model.save_pretrained(folder)
    return folder


def _parameters() -> list[Any]:
    """Two ranks are compared in the default suite, everything else in the slow one."""
    return [pytest.param(case, marks=[] if case.name == "DP2, ZeRO 1" else [pytest.mark.slow]) for case in CASES]


@pytest.fixture(scope="module", params=_parameters(), ids=str)
def run(request: pytest.FixtureRequest, hf_folder: Path, corpus: Path) -> Run:
    case: Case = request.param
    folder = hf_folder.with_name(f"case-{CASES.index(case)}")
    folder.mkdir()
    start = hf_folder.with_name("start")
    if not start.exists():
        import_hf(hf_folder, start)
    n, data = NUMBERS, hf_folder.with_name("data")
    content = {
        "run": {"dir": str(folder / "run"), "device": "cpu"},
        "model": {**MODEL, "norm_eps": 1e-5, "rope": {"theta": 10000.0}},
        "data": {
            "path": str(corpus),
            "prepared_dir": str(data),
            "sequence_length": n.sequence_length,
            "tokenizer": {"vocab_size": MODEL["vocab_size"]},
            "validation": {"fraction": 0.1},
            "workers": 1,
        },
        "batch": {
            "global_batch": n.global_batch,
            "micro_batch": n.micro_batch,
            "ramp": [{"tokens": tokens, "global_batch": size} for tokens, size in case.ramp],
        },
        "optimizer": {
            "lr": n.peak,
            "betas": n.betas,
            "eps": n.eps,
            "weight_decay": n.weight_decay,
            "decay_norms": case.decay_vectors,
            "clip_norm": n.clip_norm,
        },
        "schedule": {"kind": "cosine", "warmup_steps": n.warmup, "min_ratio": n.floor},
        "training": {"steps": n.steps, "seed": n.seed, "log_every": case.log_every},
        "evaluation": {"every_steps": VALIDATED, "sequences": None},
        # as transformers saved it, or imported first: both are read by every layout
        "checkpoint": {"init_from": str((hf_folder, start)[CASES.index(case) % 2]), "every_steps": 8},
        "tracking": {"tensorboard": False, "console": "none"},
        "precision": {"mode": "fp32"},
        "parallel": case.parallel or {},
    }
    phase_log = whole_runs.train(content, case.world, folder)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    saved = open_checkpoint(resolve(folder / "run")).load("model.")  # without the prefix
    numbers = plain_loop.Training(**{**vars(n), "decay_vectors": case.decay_vectors, "ramp": case.ramp})
    return Run(case, lines, phase_log, saved, plain_loop.train(numbers, hf_folder, data))


def bound(step: int) -> float:
    """Return the relative difference at a step that the order of additions explains.

    As in tests/support/distributed/comparing.py: the two sides add up the same terms in other orders, which differ by
    at most 12 sqrt(n) u in a step, with n the longest chain of additions; and by as much more with every step before
    it. Here n is 3328: forward and backward, each of 2 layers has 2 * 32 + 2 * 96 + 2 * 64 + 4 * 8 of them, the head
    twice 320, and a batch has 16 * 64 tokens. An update divides by sqrt(v) + eps, whose relative error is that of the
    gradient. At step 20 this is 1.5e-12; weights of size 1 that have moved by less than 0.1 then agree to 1e-10 by far.
    """
    return 12 * math.sqrt(3328) * 2.0**-53 * step


def relative(found: float, wanted: float) -> float:
    return abs(found - wanted) / abs(wanted)


def logged_steps(case: Case) -> list[int]:
    """Return every ``log_every``-th step, the steps that validate, and the last one."""
    steps = range(1, NUMBERS.steps + 1)
    return [step for step in steps if step % case.log_every == 0 or step % VALIDATED == 0 or step == NUMBERS.steps]


def test_losses_norms_and_data_positions_equal_those_of_the_plain_loop(run: Run) -> None:
    expected = {line["step"]: line for line in run.witness.lines}
    assert [line["step"] for line in run.lines] == logged_steps(run.case)
    for line in run.lines:
        wanted = expected[line["step"]]
        for name in ("tokens", "samples", "batch_crc32"):
            assert line[name] == wanted[name], (line["step"], name)
        for name in ("loss", "grad_norm", "param_norm"):
            assert relative(line[name], wanted[name]) <= bound(line["step"]), (line["step"], name)
    norms = [line["grad_norm"] for line in run.witness.lines]
    clipped = [norm > NUMBERS.clip_norm for norm in norms]
    assert 5 <= sum(clipped) <= 15, "some gradients are scaled down, and others left as they are"
    samples = run.witness.lines[-1]["samples"]
    assert run.witness.samples_of_an_epoch < samples, "the second epoch has begun, in its own order"


def test_logged_learning_rates_are_those_of_the_schedule(run: Run) -> None:
    """About eight roundings apart: three in the argument of the cosine, its own, and four around it."""
    for line in run.lines:
        assert relative(line["lr"], NUMBERS.rate(line["step"])) <= 8 * 2.0**-53, line["step"]


def test_weights_equal_those_of_the_plain_loop(run: Run) -> None:
    """Per tensor: their distance relative to the change in training; and every element."""
    assert run.weights.keys() == run.witness.weights.keys()
    for name, wanted in run.witness.weights.items():
        found, start = run.weights[name], run.witness.initial[name]
        assert found.dtype == torch.float64
        moved, apart = float((wanted - start).norm()), float((found - wanted).norm())
        assert moved / math.sqrt(wanted.numel()) > 1e-3, "every tensor is trained"
        # the bound of the update is relative to the change; storing the sum rounds to u of the weight in each step
        stored = NUMBERS.steps * 2.0**-53 * float(wanted.norm())
        assert apart <= bound(NUMBERS.steps) * moved + stored, name
        assert float((found - wanted).abs().max()) <= 1e-10, name


def test_validation_equals_that_of_the_plain_loop(run: Run) -> None:
    validated = [line["step"] for line in run.lines if "val_loss" in line]
    assert validated == [step for step in range(1, NUMBERS.steps) if step % VALIDATED == 0] + [NUMBERS.steps]
    loss, bits = run.witness.validation
    assert relative(run.lines[-1]["val_loss"], loss) <= bound(NUMBERS.steps)
    assert relative(run.lines[-1]["val_bits_per_byte"], bits) <= bound(NUMBERS.steps)


def test_logged_seconds_equal_those_of_an_independent_timer(run: Run) -> None:
    """Eighths of seconds, whose sums are exact. The time before the first phase counts as ``between``."""
    for line, seconds in zip(run.lines, own_sums(run.phase_log), strict=True):
        assert line["seconds"] == seconds, line["step"]
        assert all(seconds[phase] > 0 for phase in TRAINING), "every phase takes time"
    last = max(index for index, (phase, _) in enumerate(run.phase_log) if line_ends(run.phase_log, index))
    assert sum(sum(line["seconds"].values()) for line in run.lines) == run.phase_log[last][1]


def test_throughput_and_utilization_follow_from_that_timer(run: Run) -> None:
    """Throughput is steps x tokens / seconds of all six training phases.

    Utilization is relative to the peak of all processes, with 6 N + 12 L H E (S + 1) / 2 FLOPs per token for attention
    counted as causal, and S instead of (S + 1) / 2 for attention counted in full. Six roundings at most.
    """
    n, before = NUMBERS, 0
    matrices = sum(t.numel() for name, t in run.weights.items() if t.ndim == 2 and name != "model.embed_tokens.weight")
    per_position = 12 * MODEL["layers"] * MODEL["hidden_size"]
    for line, seconds in zip(run.lines, own_sums(run.phase_log), strict=True):
        trained = run.witness.lines[line["step"] - 1]["tokens"]
        tokens, before = trained - before, trained
        rate = tokens / sum(seconds[phase] for phase in TRAINING)
        assert line["tokens_per_second"] == rate, line["step"]
        available = whole_runs.PEAK * run.case.world
        for name, attended in (("mfu", (n.sequence_length + 1) / 2), ("mfu_full", n.sequence_length)):
            flops = 6 * matrices + per_position * attended
            assert relative(line[name], flops * rate / available) <= 6 * 2.0**-53, (line["step"], name)


def line_ends(phase_log: list[tuple[str, float]], index: int) -> bool:
    """Return True if a line of metrics is written at this log position: after device, save and validation of a step.

    The phase ``device`` also occurs within an update, where ``optimizer`` follows, not ``between``.
    """
    phases = [phase for phase, _ in phase_log]
    begin = max((place for place, phase in enumerate(phases[:index]) if phase == "device"), default=None)
    if begin is None or phases[begin + 1] != "between":
        return False
    end = begin + 1
    for names in ({"checkpoint", "saving"}, {"evaluation"}):  # a save first waits for the one before
        following = list(takewhile(names.__contains__, phases[end + 1 :]))
        if following and phases[end + 1 + len(following) :][:1] == ["between"]:
            end += len(following) + 1
    return index == end


def own_sums(phase_log: list[tuple[str, float]]) -> list[dict[str, float]]:
    """Return the seconds by phase from one line of metrics to the next."""
    sums: list[dict[str, float]] = []
    phase, since, here = "between", 0.0, defaultdict[str, float](float)
    for index, (following, now) in enumerate(phase_log):
        here[phase] += now - since
        phase, since = following, now
        if line_ends(phase_log, index):
            sums.append(dict(here) | {phase: here[phase]})
            here.clear()
    return sums
