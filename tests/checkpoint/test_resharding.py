"""Law 5: checkpoints do not depend on the layout. Any layout can load and export what any other has saved."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hlat.checkpoint import collect, export_hf, load_weights, restore
from hlat.checkpoint.format.tensor_files import Region, TensorChunk
from hlat.checkpoint.protocol.reader import open_checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.config.sections.model import ModelConfig
from hlat.runtime.errors import CheckpointError
from tests.support.checkpoint.saved_layouts import save
from tests.support.checkpoint.saved_states import assemble, assert_equal
from tests.support.checkpoint.stamped_parts import (
    FAMILIES,
    Layout,
    config_of,
    expected,
    expected_local,
    processes,
    saved_tensors,
    stamp,
)
from tests.support.checkpoint.thread_ranks import results_of, run_on_ranks

TENSORS = {"gqa": (1, 2, 4), "mha": (1, 2, 4), "mqa, tied": (1, 2, 4), "bias, qk norm": (1, 2), "tied": (1, 4)}


@st.composite
def layouts(draw: st.DrawFn, family: str, most: int = 16) -> Layout:
    """Layouts of a three-layer model, with up to about ``most`` processes; some may have no rows of a parameter."""
    tensor = draw(st.sampled_from([count for count in TENSORS[family] if count <= most]))
    stages = draw(st.sampled_from([(3,), (1, 2), (2, 1), (1, 1, 1)]))
    shards = draw(st.integers(1, min(5, max(1, most // tensor // len(stages)))))
    replicas = draw(st.integers(1, 2)) if 2 * tensor * len(stages) * shards <= most else 1
    return Layout(tensor, stages, shards, replicas)


@settings(max_examples=15)
@given(data=st.data(), family=st.sampled_from(sorted(FAMILIES)), coalesce=st.booleans())
def test_the_chunks_of_all_processes_cover_each_element_once(data: st.DataObject, family: str, coalesce: bool) -> None:
    config = config_of(family, coalesce)
    made = processes(config, data.draw(layouts(family)))
    for process in made:
        stamp(process, 1)
    found = assemble(*(collect(config, process.held, process.optimizer) for process in made))
    assert found.pop("optimizer.step") == 5
    assert_equal({k: v for k, v in found.items() if not k.startswith("rng.")}, expected(config, 1))


@settings(max_examples=8)
@given(
    data=st.data(),
    family=st.sampled_from(sorted(FAMILIES)),
    before=st.booleans(),
    after=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_state_saved_in_one_layout_is_loaded_in_another(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    family: str,
    before: bool,
    after: bool,
    dtype: torch.dtype,
) -> None:
    """Weights and moments, bit for bit, in any layout, with fused parameters or without."""
    checkpoint = save(
        tmp_path_factory.mktemp("layout"), config_of(family, before), data.draw(layouts(family, 8)), dtype=dtype
    )
    assert_equal(
        {
            name: tensor
            for name, tensor in checkpoint.load("").items()
            if not name.startswith(("rng.", "optimizer.step"))
        },
        expected(config_of(family, before), 1, dtype),
    )
    config = config_of(family, after)
    for process in processes(config, data.draw(layouts(family)), dtype):
        stamp(process, 2)
        restore(checkpoint, config, process.held, process.optimizer)
        for kind, parameter, tensor in saved_tensors(process):
            assert_equal({parameter.name: tensor}, {parameter.name: expected_local(kind, parameter, tensor, 1)})
        assert {float(entry["step"]) for entry in process.optimizer.state.values()} == {5.0}


@pytest.mark.parametrize("family", ["gqa", "tied"])
def test_exports_of_all_layouts_are_the_same_bytes(tmp_path: Path, family: str) -> None:
    layout = Layout(tensor=4, stages=(1, 2), shards=2)
    single = export_hf(save(tmp_path / "a", config_of(family), Layout()).path, tmp_path / "single")
    several = export_hf(save(tmp_path / "b", config_of(family, False), layout).path, tmp_path / "several")
    files = {path.name: path.read_bytes() for path in single.iterdir()}
    assert {path.name: path.read_bytes() for path in several.iterdir()} == files
    assert "model.safetensors" in files


def test_large_parameters_are_read_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row or two at a time, also if only some columns are needed."""
    monkeypatch.setattr("hlat.checkpoint.state._READ_BYTES", 200)
    monkeypatch.setattr("hlat.checkpoint.format.tensor_files._BATCH_BYTES", 100)
    config = config_of("gqa")
    checkpoint = save(tmp_path, config, Layout(stages=(1, 2)))
    for process in processes(config, Layout(tensor=2, shards=2)):
        restore(checkpoint, config, process.held, process.optimizer)
        for kind, parameter, tensor in saved_tensors(process):
            assert torch.equal(tensor, expected_local(kind, parameter, tensor, 1))


def test_a_checkpoint_that_does_not_fit_a_rank_changes_nothing(tmp_path: Path) -> None:
    """All tensors stored on this rank are listed, and none of those on other ranks."""
    checkpoint = save(tmp_path, config_of("gqa"), Layout())
    wider = ModelConfig.model_validate(config_of("gqa").model_dump() | {"intermediate_size": 48})
    for index, process in enumerate(processes(wider, Layout(tensor=2, stages=(1, 2)))):
        stamp(process, 2)
        with pytest.raises(CheckpointError) as caught:
            restore(checkpoint, wider, process.held, process.optimizer)
        layers = [0] if index < 2 else [1, 2]
        for layer in range(3):
            named = f"optimizer.exp_avg.model.layers.{layer}.mlp.down_proj.weight: saved as float32 (24, 40)"
            assert (named in str(caught.value)) == (layer in layers)
        for kind, parameter, tensor in saved_tensors(process):
            assert torch.equal(tensor, expected_local(kind, parameter, tensor, 2))


def test_weights_are_loaded_on_every_rank(tmp_path: Path) -> None:
    """From bf16 to fp32, verified on rank 0; each rank fills its local parameters only."""
    config = config_of("tied")
    path = save(tmp_path / "run" / "checkpoints", config, Layout(tensor=2), dtype=torch.bfloat16).path
    made = processes(config, Layout(stages=(2, 1), shards=2))
    for process in made:
        stamp(process, 2)
    results_of(
        run_on_ranks(len(made), lambda ranks: load_weights(tmp_path / "run", config, made[ranks.rank].held, ranks))
    )
    for process in made:
        for kind, parameter, tensor in saved_tensors(process):
            saved = expected_local(kind, parameter, tensor, 1).bfloat16().float()
            assert torch.equal(tensor, saved if kind == "model." else expected_local(kind, parameter, tensor, 2))
    assert path == tmp_path / "run" / "checkpoints" / "step-00000005"


@st.composite
def chunked_tensors(draw: st.DrawFn) -> tuple[torch.Tensor, list[TensorChunk]]:
    """A tensor of up to three dimensions, and chunks that cover it, made by splitting chunks repeatedly."""
    shape = draw(st.lists(st.integers(1, 7), max_size=3))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
    count = torch.Size(shape).numel()
    tensor = torch.arange(count).mul(37).remainder(2 if dtype == torch.bool else 251).to(dtype).view(shape)
    areas = [((0,) * len(shape), tuple(shape))]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        offsets, sizes = areas.pop(draw(st.integers(0, len(areas) - 1)))
        dimension = draw(st.integers(0, len(shape) - 1))
        first = draw(st.integers(0, sizes[dimension]))
        for start, size in ((0, first), (first, sizes[dimension] - first)):
            if size:
                moved = (*offsets[:dimension], offsets[dimension] + start, *offsets[dimension + 1 :])
                areas.append((moved, (*sizes[:dimension], size, *sizes[dimension + 1 :])))
    return tensor, [TensorChunk("model.a", tuple(shape), o, (slice_of(tensor, o, n),)) for o, n in areas]


def slice_of(tensor: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]


@settings(max_examples=60)
@given(data=st.data(), chunked=chunked_tensors())
def test_any_region_can_be_read_from_any_chunks(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, chunked: tuple[torch.Tensor, list[TensorChunk]]
) -> None:
    tensor, chunks = chunked
    checkpoint = open_checkpoint(CheckpointStore(tmp_path_factory.mktemp("region"), 1).save(1, chunks, {}))
    regions = []
    for _ in range(3):
        bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in tensor.shape]
        regions.append(Region("model.a", tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds)))
    for region, found in zip(regions, checkpoint.read_regions(regions), strict=True):
        assert_equal({"a": found}, {"a": slice_of(tensor, region.offsets, region.sizes)})
    assert_equal(checkpoint.load(""), {"model.a": tensor})
