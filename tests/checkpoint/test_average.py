"""The average of checkpoints: numpy's, for parents of any layouts, in memory that their number does not change."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hlat.checkpoint import average, average_checkpoints, collect, export_hf, load_model, load_weights
from hlat.checkpoint.average import round_once
from hlat.checkpoint.format.tensor_files import replicated_chunks
from hlat.checkpoint.protocol.reader import Checkpoint, open_checkpoint, verify_checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.config.sections.model import ModelConfig
from hlat.model import build, collect_local_parameters
from hlat.model.hf.folder import read_hf
from hlat.model.parameter_layout import canonical_shapes
from hlat.runtime.errors import CheckpointError
from tests.support.checkpoint.saved_layouts import save
from tests.support.checkpoint.saved_states import assemble, assert_equal
from tests.support.checkpoint.stamped_parts import Layout, config_of, processes

LAYOUTS = (Layout(), Layout(tensor=2, stages=(2, 1)), Layout(tensor=4, stages=(1, 1, 1), shards=3))


def stored(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return checkpoint.load("model.")


def parents_in(tmp_path: Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> list[Checkpoint]:
    """Save three states of a model in three layouts, fused and not."""
    configs = (config, config.model_copy(update={"coalesce": False}), config)
    return [
        save(tmp_path / str(index), each, layout, salt=index, dtype=dtype)
        for index, (each, layout) in enumerate(zip(configs, LAYOUTS, strict=True))
    ]


def numpys(parents: list[Checkpoint], factors: list[float]) -> dict[str, torch.Tensor]:
    """Averages computed by numpy, in float64 and rounded to float32."""
    loaded = [stored(parent) for parent in parents]
    return {
        name: torch.from_numpy(
            np.average([each[name].double().numpy() for each in loaded], axis=0, weights=factors).astype(np.float32)
        )
        for name in loaded[0]
    }


@pytest.mark.parametrize(
    ("arguments", "factors"),
    [
        ({}, [1.0, 1.0, 1.0]),
        ({"coefficients": [0.5, 1.0, 2.5]}, [0.5, 1.0, 2.5]),
        ({"decay": 0.75}, [0.5625, 0.75, 1.0]),
    ],
)
def test_the_average_of_three_layouts_equals_numpys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], factors: list[float]
) -> None:
    """Bit for bit: both add in float64 in the same order, and round once. Chunks of few rows are joined correctly."""
    monkeypatch.setattr(average, "_CHUNK_ELEMENTS", 100)
    parents = parents_in(tmp_path, config_of("gqa"))
    out = average_checkpoints([parent.path for parent in parents], tmp_path / "out", **arguments)
    assert verify_checkpoint(out) == []
    assert_equal(stored(open_checkpoint(out)), numpys(parents, factors))


def test_the_average_is_loaded_in_any_layout_exported_and_names_its_parents(tmp_path: Path) -> None:
    config = config_of("tied")
    parents = parents_in(tmp_path, config)
    out = average_checkpoints([parent.path for parent in parents], tmp_path / "out", coefficients=[1, 2, 1])
    expected = numpys(parents, [1, 2, 1])
    model, meta = load_model(out, "cpu")
    assert_equal(
        assemble(collect(model.config, collect_local_parameters(model))), {f"model.{n}": t for n, t in expected.items()}
    )
    held = processes(config, Layout(tensor=2, stages=(3,)))
    for process in held:
        load_weights(out, config, process.held)  # as checkpoint.init_from does
    loaded = assemble(*(collect(config, process.held) for process in held))
    assert_equal(loaded, {f"model.{name}": tensor for name, tensor in expected.items()})
    _, tensors = read_hf(export_hf(out, tmp_path / "exported"))
    assert_equal(dict(tensors), expected)
    assert [parent["path"] for parent in meta["average"]] == [str(parent.path) for parent in parents]
    assert [parent["share"] for parent in meta["average"]] == [0.25, 0.5, 0.25]
    assert {parent["step"] for parent in meta["average"]} == {5}
    assert "data_fingerprint" not in meta, "no run can resume from it"


def bf16_of(value: Fraction) -> Fraction:
    """Round to 8 significant bits, to nearest, ties to even."""
    if value == 0:
        return value
    exponent = 0
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 7)
    return round(value / unit) * unit  # Python rounds fractions half to even


@given(
    significand=st.integers(2**7, 2**8 - 1),
    below=st.sampled_from([0.0, 0.25, 0.5, 0.75]),
    nudge=st.sampled_from([-(2.0**-40), 0.0, 2.0**-40, -(2.0**-24), 2.0**-24]),
    sign=st.sampled_from([-1, 1]),
)
def test_float64_is_rounded_once(significand: int, below: float, nudge: float, sign: int) -> None:
    """Close to ties, where a rounding to float32 in between would decide wrongly."""
    value = sign * (significand + below + nudge)
    found = round_once(torch.tensor([value], dtype=torch.float64), torch.bfloat16)
    assert Fraction(found.item()) == bf16_of(Fraction(value))


def test_values_that_are_not_finite_stay_so() -> None:
    values = torch.tensor([np.inf, -np.inf, np.nan, 1e300, 0.0, -0.0], dtype=torch.float64)
    assert_equal(
        {"": round_once(values, torch.bfloat16)},
        {"": torch.tensor([np.inf, -np.inf, np.nan, np.inf, 0, -0.0]).bfloat16()},
    )


def test_bf16_checkpoints_give_a_bf16_average(tmp_path: Path) -> None:
    parents = parents_in(tmp_path, config_of("mha"), torch.bfloat16)
    out = open_checkpoint(average_checkpoints([parent.path for parent in parents], tmp_path / "out"))
    loaded = [stored(parent) for parent in parents]
    exact = {name: sum(each[name].double() for each in loaded) / 3 for name in loaded[0]}
    assert_equal(stored(out), {name: round_once(tensor, torch.bfloat16) for name, tensor in exact.items()})


FIELDS = {"vocab_size": 4096, "layers": 1, "hidden_size": 512, "intermediate_size": 64, "heads": 4}


def peak_of(work: Callable[[], object]) -> int:
    """Largest resident set of this process while it does some work, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far
    work()
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux's /proc has the peak of memory")
def test_memory_does_not_depend_on_the_number_of_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten checkpoints of 21 MB in the memory of two; holding even one of them more would show."""
    monkeypatch.setattr(average, "_CHUNK_ELEMENTS", 1 << 16)
    config = ModelConfig.model_validate(FIELDS)
    shapes = canonical_shapes(config)
    folders = []
    for index in range(10):
        tensors = {f"model.{name}": torch.full(shape, float(index)) for name, shape in shapes.items()}
        meta = {"step": index, "model": config.model_dump(mode="json") | {"max_sequence_length": 8}}
        folders.append(CheckpointStore(tmp_path / "run", 10).save(index, replicated_chunks(tensors), meta))
    size = sum(tensor.nbytes for tensor in tensors.values())
    average_checkpoints(folders[:2], tmp_path / "first")  # the allocator and the caches have what they need
    two = peak_of(lambda: average_checkpoints(folders[:2], tmp_path / "two"))
    ten = peak_of(lambda: average_checkpoints(folders, tmp_path / "ten"))
    assert size > 20e6
    # The index and metadata of eight more checkpoints, and what the allocator happens to keep: half of a parent.
    assert ten - two < size / 2
    assert {float(t.mean()) for t in stored(open_checkpoint(tmp_path / "ten")).values()} == {4.5}


def run_of(tmp_path: Path, steps: int) -> Path:
    config = config_of("gqa").model_copy(update={"max_sequence_length": 8})
    store = CheckpointStore(tmp_path / "run" / "checkpoints", 10)
    for step in range(1, steps + 1):
        model = build(config, device="cpu", seed=step)
        meta = {"step": step, "model": config.model_dump(mode="json")}
        store.save(step, collect(config, collect_local_parameters(model)), meta)
    return tmp_path / "run"


def test_the_last_checkpoints_of_a_run_are_averaged(tmp_path: Path) -> None:
    run = run_of(tmp_path, 4)
    out = open_checkpoint(average_checkpoints([run], tmp_path / "out", last=3))
    assert [parent["step"] for parent in out.meta["average"]] == [2, 3, 4]
    with pytest.raises(CheckpointError, match=r"last 5 checkpoints; steps of those it has: 1, 2, 3, 4"):
        average_checkpoints([run], tmp_path / "more", last=5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coefficients": [1.0]}, "1 coefficients for 2 checkpoints"),
        ({"coefficients": [1.0, -1.0]}, "positive"),
        ({"coefficients": [1.0, float("nan")]}, "positive"),
        ({"decay": 1.0}, "between 0 and 1"),
        ({"decay": 0.5, "coefficients": [1.0, 2.0]}, "either"),
        ({"weights": "ema"}, "has no ema weights"),
        ({"last": 2}, "one run folder"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    folders = sorted((run_of(tmp_path, 2) / "checkpoints").iterdir())
    with pytest.raises(CheckpointError, match=message):
        average_checkpoints(folders, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_one_checkpoint_and_a_checkpoint_twice_are_refused(tmp_path: Path) -> None:
    first, second = sorted((run_of(tmp_path, 2) / "checkpoints").iterdir())
    for folders, message in (([first], "two checkpoints or more"), ([first, second, first], "named twice")):
        with pytest.raises(CheckpointError, match=message):
            average_checkpoints(folders, tmp_path / "out")
    with pytest.raises(CheckpointError, match="oldest first"):
        average_checkpoints([second, first], tmp_path / "out", decay=0.5)


def test_different_models_and_tokenizers_are_all_listed(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).write_text(name)
    config = config_of("gqa")
    other = config.model_copy(update={"norm_eps": 1e-6, "rope": config.rope.model_copy(update={"theta": 5e5})})
    first = save(tmp_path / "a", other, Layout(), files={"tokenizer/tokenizer.json": tmp_path / "one"})
    second = save(tmp_path / "b", config, Layout(), files={"tokenizer/tokenizer.json": tmp_path / "other"})
    with pytest.raises(CheckpointError) as refused:
        average_checkpoints([first.path, second.path], tmp_path / "out")
    assert all(word in str(refused.value) for word in ("model.norm_eps", "model.rope", "its tokenizer"))
    assert not (tmp_path / "out").exists()
