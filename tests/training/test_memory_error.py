"""Out of memory on a device ends with what the rank held, by the count of plans, and with changes that fit by it."""

import re

import pytest
import torch

from hlat.config import Recipe, parse_recipe
from hlat.hardware import load_catalog, parse_cluster
from hlat.launch.worker_process import describe_error
from hlat.planner.plan import fits
from hlat.planner.problem.layouts import recipe_step
from hlat.planner.search import predict_layout
from hlat.runtime.backend.base import AllocatorUse
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.join import Runtime
from hlat.runtime.errors import DeviceMemoryError
from hlat.runtime.storage.run_folder import EARLIER_ATTEMPT_ENV
from hlat.training.interruptions import explained_out_of_memory

GIB = 1 << 30
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB.\nSee the documentation"
CHIP = "NVIDIA H100 80GB HBM3"
EIGHT = "p5.48xlarge:1"


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """An H100 that is not here, as far as the message asks for it."""
    answers = {"memory_bytes": 80 * GIB, "chip_name": CHIP, "peak_memory_bytes": 70 * GIB}
    answers["allocator_use"] = AllocatorUse(78 * GIB, 2)
    for name, answer in answers.items():
        monkeypatch.setattr(type(backend_of("cuda")), name, lambda self, device, answer=answer: answer)


def recipe(*overrides: str, world: int = 8) -> Recipe:
    model = {"vocab_size": 128256, "layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "heads": 32}
    content = {
        "run": {"device": "cuda"},
        "model": model | {"kv_heads": 8},
        "data": {"path": "none", "sequence_length": 8192, "tokenizer": {"train": "char"}},
        "batch": {"global_batch": 32, "micro_batch": 4},
        "parallel": {"zero": 3},
        "training": {"steps": 9},
        "precision": {"mode": "mixed"},
    }
    return parse_recipe(content, overrides=overrides, world=world)


def explained(of: Recipe, world: int = 8, steps: int = 0) -> DeviceMemoryError:
    runtime = Runtime(torch.device("cuda", 0), 0, world)
    with pytest.raises(DeviceMemoryError) as caught, explained_out_of_memory(of, runtime, lambda: steps):
        raise torch.OutOfMemoryError(FULL)
    return caught.value


def test_the_bytes_of_the_message_are_those_of_a_plan():
    text = str(explained(recipe()))
    request, candidate = recipe_step(recipe(), parse_cluster(EIGHT, load_catalog()))
    planned = predict_layout(request, candidate).memory[0]
    assert f"Plans count {planned.total / GIB:.2f} GiB for this rank" in text
    for name in ("parameters", "optimizer", "gradients", "activations"):
        assert f"{name} {getattr(planned, name) / GIB:.2f} GiB" in text
    assert "Tried to allocate 2.00 GiB." in text and "See the documentation" not in text
    assert "tensors took 70.00 GiB at most; the allocator had reserved 78.00 GiB, and gave memory back 2 times" in text


def test_the_cause_of_a_stages_error_counts_and_a_mode_that_is_not_settled_yet():
    runtime = Runtime(torch.device("cuda", 0), 0, 8)
    with (
        pytest.raises(DeviceMemoryError) as caught,
        explained_out_of_memory(recipe("precision.mode=auto"), runtime, lambda: 0),
    ):
        try:
            raise torch.OutOfMemoryError(FULL)
        except torch.OutOfMemoryError as error:
            raise RuntimeError("a stage failed") from error
    assert str(caught.value) == str(explained(recipe()))
    assert not caught.value.retryable


def test_after_an_attempt_that_trained_memory_may_be_held_by_its_processes(monkeypatch):
    monkeypatch.setenv(EARLIER_ATTEMPT_ENV, "6 x")
    assert explained(recipe()).retryable


@pytest.mark.parametrize("overrides", [(), ("parallel.zero=0",), ("model.layers=12", "parallel.zero=0")])
def test_what_is_advised_fits_by_the_plan(overrides):
    text = str(explained(recipe(*overrides)))
    changes = re.search(r"It fits with (.*)\.$", text).group(1)
    assert not fits(*_plan(recipe(*overrides))), "it did not fit before"
    for words, needed in re.findall(r"`(.*?)` \((.*?) GiB\)", changes):
        request, prediction = _plan(recipe(*overrides, *words.split()))
        assert fits(request, prediction), words
        assert f"{prediction.peak_memory / GIB:.1f}" == needed


def _plan(of: Recipe):
    request, candidate = recipe_step(of, parse_cluster(EIGHT, load_catalog()))
    return request, predict_layout(request, candidate)


def test_nothing_is_advised_that_does_not_fit():
    text = str(explained(recipe("model.layers=128", "parallel.zero=0"), world=1))
    assert "fits with" not in text and "for more devices" in text
    small = str(explained(recipe("model.layers=1", "batch.micro_batch=1", world=1), world=1))
    assert "That fits: look for other programs" in small


def test_a_restart_is_tried_only_after_steps_that_had_enough_memory():
    first, later = describe_error(explained(recipe())), describe_error(explained(recipe(), steps=7))
    assert (first.is_bug, first.retryable) == (False, False), "the supervisor ends the run"
    assert (later.is_bug, later.retryable) == (False, True) and "after 7 steps" in later.message


def test_other_errors_pass():
    with pytest.raises(KeyError), explained_out_of_memory(recipe(), Runtime(torch.device("cuda")), lambda: 0):
        raise KeyError("a bug")
