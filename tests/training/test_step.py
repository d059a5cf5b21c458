"""Training step: gradient accumulation equals the large batch; validation and phase timer."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hlat.config import AnomalyConfig, BatchSchedule
from hlat.config.load import parse_recipe
from hlat.data.samples.training_data import Batch
from hlat.hardware import PeakFlops
from hlat.model import IGNORED, build
from hlat.parallel import build_parallel
from hlat.resilience import AnomalyPolicy
from hlat.runtime.distributed.join import Runtime
from hlat.training import accumulate_gradients, run_state
from hlat.training.components import StepResult
from hlat.training.loop import PhaseTimer
from hlat.training.run_state import RunState
from hlat.training.step_metrics import TRAINING_PHASES, evaluations_after, report_anomaly
from hlat.training.validation.losses import SingleProcessModel, validate

CPU = torch.device("cpu")
UTILIZATIONS = [  # further measurements of the peak, rank 0 or not, utilization of a step of 2000 FLOP/s
    pytest.param([4000.0], True, [0.5, 0.5, 0.5, 0.5], id="better at once"),
    pytest.param([1500.0, 2200.0, 2600.0], True, [None, 2000 / 2200, 2000 / 2600, 2000 / 2600], id="slowly better"),
    pytest.param([1000.0, 1000.0, 1000.0], True, [None, None, None, None], id="never better"),
    pytest.param([], False, [None, None, None, None], id="not recorded"),
]
MODEL = {"vocab_size": 97, "layers": 2, "hidden_size": 32, "intermediate_size": 96, "heads": 4, "kv_heads": 2}


def recipe(micro_batch):
    return parse_recipe(
        {
            "model": MODEL,
            "data": {"path": "unused", "sequence_length": 16, "tokenizer": {"train": "char"}},
            "batch": {"global_batch": 32, "micro_batch": micro_batch},
            "training": {"steps": 10},
            "precision": {"mode": "fp32"},
        }
    )


@pytest.mark.parametrize(("peaks", "first", "expected"), UTILIZATIONS)
def test_no_utilization_is_above_one(peaks, first, expected, monkeypatch):
    """A peak that was measured beside another program is measured again, by rank 0, three times at most."""
    left = list(peaks)
    monkeypatch.setattr(run_state, "peak_again", lambda before, *_: PeakFlops(left.pop(0), "measured here"))
    state = SimpleNamespace(
        recipe=recipe(32),
        peak=PeakFlops(1000.0, "measured here"),
        peak_tries=0,
        runtime=SimpleNamespace(world=2, device=CPU, ranks=SimpleNamespace(is_first=first)),
        _flops_per_token={"mfu": 80.0, "mfu_full": 100.0},  # 20 tokens a second are 800 and 1000 FLOP/s a device
    )
    found = [RunState.utilization(state, tokens) for tokens in (10.0, 40.0, 40.0, 40.0, 40.0)]
    assert found[0] == {"mfu": 0.4, "mfu_full": 0.5}
    assert [each.get("mfu_full") for each in found[1:]] == expected
    assert all(value <= 1.0 for each in found for value in each.values())


@pytest.mark.parametrize(
    "changes", [[], ["evaluation.every_steps=4"], ["evaluation.every_tokens=1300", "evaluation.every_steps=null"]]
)
def test_evaluations_to_come_are_those_that_happen(changes):
    """Counted step by step: at the multiples of either field, and at the end."""
    run = parse_recipe(recipe(32).model_dump(mode="json"), overrides=["training.steps=23", *changes], world=1)
    every, tokens = run.evaluation.every_steps, run.evaluation.every_tokens
    happen = [
        step
        for step in range(1, 24)
        if step == 23 or (every and step % every == 0) or (tokens and step * 512 // tokens > (step - 1) * 512 // tokens)
    ]
    for step in range(23):
        assert evaluations_after(run, step) == sum(each > step for each in happen), step


def test_an_anomaly_is_one_plain_sentence_and_its_event_has_the_values():
    policy, tracker = AnomalyPolicy(AnomalyConfig(window=16), BatchSchedule(8), 64), RecordingTracker()
    for step in range(1, 34):
        policy.check(step, (step - 1) * 8, 4.2, 0.52 + 0.01 * (step % 3))
    for step, loss, norm, words in (
        (34, 4.2, 10.7131, "gradient norm 10.7, usually 0.53; clipped and applied"),
        (35, 9.3061, 0.5, "loss 9.31, usually 4.2; applied"),
        (36, math.nan, 0.5, "loss nan, gradient norm 0.5; not applied"),
    ):
        verdict = policy.check(step, (step - 1) * 8, loss, norm)
        result = StepResult(torch.tensor(loss), torch.tensor(norm), 1e-3, verdict)
        ranks = SimpleNamespace(all_reduce_sum=lambda tensor: tensor)
        state = SimpleNamespace(
            recipe=recipe(32), step=step, last_batch=None, saved=None, runtime=SimpleNamespace(ranks=ranks)
        )
        report_anomaly(state, result, tracker)
        assert tracker.warnings[-1] == f"step {step}: {words}"
        event = tracker.events[-1]
        assert (event["samples"], event["clip_norm"]) == ([(step - 1) * 8, step * 8], 1.0)
        assert event["grad_norm"] == pytest.approx(norm) and event["window"]["norm_median"] == pytest.approx(0.53)


class RecordingTracker:
    def __init__(self):
        self.events, self.warnings = [], []

    def event(self, kind, /, **fields):
        self.events.append(fields)

    def warn(self, text):
        self.warnings.append(text)


def batch_of(generator, ignored=False):
    tokens = torch.randint(0, 97, (32, 17), generator=generator)
    labels = tokens[:, 1:].clone()
    if ignored:  # micro-batches with different numbers of labels, one with none at all
        labels[:8] = IGNORED
        labels[9, 3:] = IGNORED
    return Batch(tokens[:, :-1], labels, np.arange(32))


def gradients(micro_batch, dtype, ignored):
    model = build_parallel(recipe(micro_batch), Runtime(CPU), seed=1, dtype=dtype)
    loss = accumulate_gradients(model, batch_of(torch.Generator().manual_seed(5), ignored))
    return loss, {local_parameters.name: local_parameters.gradient for local_parameters in model.local_parameters}


@pytest.mark.parametrize("ignored", [False, True])
def test_a_batch_of_32_and_8_micro_batches_of_4_give_the_same_gradient_up_to_rounding(ignored):
    """Bound: both are sums of the same 32 x 16 token gradients g_t in another order.

    A sum of n terms in precision u errs by at most (n - 1) u sum|g_t| in any order, and each g_t itself carries the
    rounding of the forward and backward pass, whose matrix products may be blocked differently for another batch
    size: at most d u |g_t| with d the number of additions on the longest path through two layers, head and loss
    (contractions over 32, 96 and 97 terms, some ten of them a layer, back and forth: d < 2 * 2 * 10 * 97 < 4000).
    sum|g_t| is measured as the batch's gradient computed sample by sample with absolute values added up.
    """
    whole_loss, whole = gradients(32, torch.float32, ignored)
    parts_loss, parts = gradients(4, torch.float32, ignored)
    _, exact = gradients(32, torch.float64, ignored)
    unit, terms, depth = 2.0**-24, 32 * 16, 4000
    magnitude = absolute_sum_of_sample_gradients(ignored)
    for name in whole:
        bound = (terms + depth) * unit * magnitude[name] + 1e-12
        assert ((whole[name] - parts[name]).abs() <= 2 * bound).all(), name
        assert (whole[name] - exact[name]).abs().max() > 0, "fp32 is not fp64: the comparison compares something"
    assert abs(whole_loss - parts_loss) <= (terms + depth) * unit * whole_loss


def absolute_sum_of_sample_gradients(ignored):
    batch = batch_of(torch.Generator().manual_seed(5), ignored)
    total = int((batch.labels_BS != IGNORED).sum())
    model = build(recipe(32).model, device=CPU, seed=1, dtype=torch.float64)
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for row in range(32):
        model.zero_grad()
        (model(batch.inputs_BS[row : row + 1], batch.labels_BS[row : row + 1]) / total).backward()
        for name, p in model.named_parameters():
            sums[name] += p.grad.abs()
    return sums


def test_in_float64_accumulation_differs_by_float64_rounding_only():
    _, whole = gradients(32, torch.float64, ignored=True)
    _, parts = gradients(4, torch.float64, ignored=True)
    for name in whole:
        # the same bound as above with u = 2**-53, relative to the largest entry; a wrong weighting of
        # micro-batches with fewer labels would differ in the first digit
        assert (whole[name] - parts[name]).abs().max() <= 1e-11 * whole[name].abs().max(), name


def test_the_loss_of_an_untrained_model_is_that_of_chance():
    model = build_parallel(recipe(32), Runtime(CPU), seed=1)
    loss = accumulate_gradients(model, batch_of(torch.Generator().manual_seed(5)))
    # logits of std ~ 0.02 * sqrt(32) = 0.11 around zero add half their variance, 0.007, to log(97)
    assert float(loss) == pytest.approx(math.log(97), abs=0.05)


class ThreeRows:
    """Validation set of three sequences with isolated documents."""

    sources = ("texts",)

    def __init__(self):
        whole = batch_of(torch.Generator().manual_seed(6))
        positions = torch.arange(16).repeat(3, 1)
        positions[1, 9:] -= 9
        self.rows = replace(whole, inputs_BS=whole.inputs_BS[:3], labels_BS=whole.labels_BS[:3], positions_BS=positions)

    def __len__(self):
        return 3

    def label_bytes(self, labels_BS):
        return int((labels_BS != -100).sum())

    def batch(self, first, count):
        rows, here = self.rows, slice(first, first + count)
        return replace(
            rows,
            inputs_BS=rows.inputs_BS[here],
            labels_BS=rows.labels_BS[here],
            positions_BS=rows.positions_BS[here],
        )


def test_validation_isolates_documents_also_in_a_padded_last_micro_batch():
    """In float64: batches of two rows (one padded) and of three give the same loss; without isolation it differs."""
    isolated = recipe(2).model_copy(update={"data": recipe(2).data.model_copy(update={"isolate": True})})
    model, data = build_parallel(isolated, Runtime(CPU), seed=1, dtype=torch.float64), ThreeRows()
    found = validate(model, data, 2)
    with torch.no_grad():
        rows = data.rows
        wanted = float(model.stages[0](rows.inputs_BS, rows.labels_BS, positions=rows.positions_BS)) / 48
        joined = float(model.stages[0](rows.inputs_BS, rows.labels_BS)) / 48
    assert found.tokens == 48
    assert found.loss == pytest.approx(wanted, rel=1e-12)
    assert abs(found.loss - joined) > 1e-9 * joined
    assert validate(SingleProcessModel(model.stages[0]), data, 2).loss == pytest.approx(wanted, rel=1e-12)


def test_the_phase_timer_adds_up_phases_and_starts_again():
    now = [0.0]
    watch = PhaseTimer(clock=lambda: now[0])
    for name, seconds in (("data", 1.0), ("forward", 2.0), ("evaluation", 50.0), ("optimizer", 0.5), ("forward", 0.25)):
        watch(name)
        now[0] += seconds
    watch("between")
    now[0] += 0.125
    seconds = {"data": 1.0, "forward": 2.25, "evaluation": 50.0, "optimizer": 0.5, "between": 0.125}
    assert watch.reset() == seconds
    assert sum(seconds.get(name, 0.0) for name in TRAINING_PHASES) == 3.75, "throughput is that of training"
    assert watch.reset() == {"between": 0.0}
