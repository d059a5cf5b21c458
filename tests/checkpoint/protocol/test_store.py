"""A store loads what it has saved, and keeps the checkpoints of the retention rule."""

import json
import shutil
import warnings
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hlat.checkpoint.format.tensor_files import replicated_chunks
from hlat.checkpoint.protocol.reader import open_checkpoint, read_meta, resolve, verify_checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.runtime.errors import CheckpointError
from tests.support.checkpoint.saved_states import assert_equal, assert_is_step, save, state

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints", keep_last=2)


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=5),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_tensors_are_loaded_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], dtype: torch.dtype, seed: int
) -> None:
    """For all bit patterns: NaN payloads, infinities, denormals."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for index, shape in enumerate(shapes):
        count = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
        tensors[f"model.{index}"] = raw.view(dtype).reshape(shape)
    root = tmp_path_factory.mktemp("bits")
    CheckpointStore(root, 1).save(1, replicated_chunks(tensors), {})
    newest = CheckpointStore(root, 1).newest()
    assert newest is not None
    assert_equal(newest.load(""), tensors)


def test_an_empty_store_has_no_newest_checkpoint(store: CheckpointStore) -> None:
    assert store.newest() is None
    assert store.steps() == []
    assert store.prune() == []


def test_tensors_can_be_loaded_by_prefix(store: CheckpointStore) -> None:
    loaded = open_checkpoint(save(store, 3)).load("optimizer.")
    assert_equal(loaded, {k.removeprefix("optimizer."): v for k, v in state(3).items() if k.startswith("optimizer.")})


def test_all_tensors_that_do_not_fit_are_listed(store: CheckpointStore) -> None:
    targets = {
        "model.weight": torch.zeros(7, 5),
        "model.half": torch.zeros(9),
        "model.other": torch.zeros(1),
        "optimizer.step": torch.tensor(0),
    }
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(save(store, 3)).check(targets)
    message = str(caught.value)
    assert "model.weight: saved as float32 (5, 7), needed as float32 (7, 5)" in message
    assert "model.half: saved as bfloat16 (9,), needed as float32 (9,)" in message
    assert "model.other: not in the checkpoint" in message
    assert "optimizer.step" not in message


def test_dcp_can_read_the_files(store: CheckpointStore) -> None:
    """DCP's own reader and planner load the same tensors."""
    path = save(store, 5)
    found = {name: torch.zeros_like(tensor).contiguous() for name, tensor in state(5).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=path, no_dist=True)
    assert_equal(found, state(5))


def test_equal_states_give_equal_indexes(tmp_path: Path) -> None:
    """The index contains no path, host, user or time."""
    first = save(CheckpointStore(tmp_path / "a", 1), 1)
    second = save(CheckpointStore(tmp_path / "b" / "c", 1), 1)
    assert (first / ".metadata").read_bytes() == (second / ".metadata").read_bytes()
    assert str(tmp_path).encode() not in b"".join(p.read_bytes() for p in first.iterdir())


def test_a_large_state_is_written_to_several_files(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hlat.checkpoint.format.tensor_files._FILE_BYTES", 100)
    path = save(store, 2)
    assert len(list(path.glob("model__0_*.distcp"))) == 4
    assert verify_checkpoint(path) == []
    assert_is_step(store.newest(), 2)


def test_files_are_copied_into_the_checkpoint(store: CheckpointStore, tmp_path: Path) -> None:
    source = tmp_path / "source.json"
    source.write_bytes(bytes(range(256)) * 10_000)
    path = save(store, 1, {"tokenizer/tokenizer.json": source, "tokenizer/deep/er/a.txt": source})
    source.unlink()
    assert (path / "tokenizer" / "deep" / "er" / "a.txt").read_bytes() == bytes(range(256)) * 10_000
    assert verify_checkpoint(path) == []


@pytest.mark.parametrize("name", ["../a", "/a", "a/../../b", "meta.json", "manifest.json", "COMMITTED"])
def test_file_names_must_stay_inside_the_checkpoint_and_not_replace_its_own_files(
    store: CheckpointStore, tmp_path: Path, name: str
) -> None:
    with pytest.raises(CheckpointError, match="plain relative path"):
        save(store, 1, {name: tmp_path / "source"})
    assert store.steps() == []


def test_saving_a_step_again_replaces_its_checkpoint(store: CheckpointStore) -> None:
    save(store, 1)
    store.save(1, replicated_chunks({"model.new": torch.ones(2)}), {"step": 1, "new": True})
    newest = store.newest()
    assert newest is not None and newest.meta["new"]
    assert_equal(newest.load(""), {"model.new": torch.ones(2)})
    assert [path.name for path in store.root.iterdir()] == ["step-00000001"]


def test_resolve_takes_a_run_folder_a_checkpoints_folder_or_a_checkpoint(
    store: CheckpointStore, tmp_path: Path
) -> None:
    for step in (5, 100_000_000, 20):
        save(store, step)
    newest = store.root / "step-100000000"
    assert resolve(tmp_path / "run") == resolve(store.root) == resolve(newest) == newest
    assert resolve(store.root / "step-00000005") == store.root / "step-00000005"
    renamed = store.root.parent / "best"
    shutil.copytree(newest, renamed)
    assert resolve(renamed) == renamed
    assert read_meta(resolve(renamed))["step"] == 100_000_000


def test_resolve_reports_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        resolve(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="hlat import"):
        resolve(tmp_path)
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(CheckpointError, match="COMMITTED is missing"):
        resolve(tmp_path / "step-00000001")


def test_reading_changes_nothing(store: CheckpointStore) -> None:
    """A reader does not remove the staging folder of a running save."""
    save(store, 1)
    staging = store.root / ".staging-step-00000002"
    staging.mkdir()
    resolve(store.root.parent)
    assert staging.exists()


@pytest.mark.parametrize("text", ["", "[]", "{", "nul"])
def test_metadata_must_be_an_object(store: CheckpointStore, text: str) -> None:
    path = save(store, 1)
    (path / "meta.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"meta\.json"):
        read_meta(path)


def test_metadata_must_be_json(store: CheckpointStore) -> None:
    path = save(store, 1)
    assert json.loads((path / "meta.json").read_text()) == {"step": 1, "text": "é1"}
    with pytest.raises(ValueError, match="JSON"):
        store.save(2, [], {"loss": float("nan")})
    assert store.steps() == [1]


def steps_kept_by_rule(steps: list[int], keep_last: int, every: int | None) -> set[int]:
    return set(steps[-keep_last:]) | {step for step in steps if every and step % every == 0}


@settings(max_examples=40, deadline=None)
@example(steps=[0, 1, 2], keep_last=1, every=2, damaged={1, 2}, fresh=False)
@given(
    steps=st.lists(st.integers(0, 60), unique=True, max_size=8).map(sorted),
    keep_last=st.integers(1, 4),
    every=st.none() | st.integers(1, 20),
    damaged=st.sets(st.integers(0, 60)),
    fresh=st.booleans(),
)
def test_pruning_follows_the_retention_rule(
    tmp_path_factory: pytest.TempPathFactory,
    valid_checkpoint: Path,
    steps: list[int],
    keep_last: int,
    every: int | None,
    damaged: set[int],
    fresh: bool,
) -> None:
    """The steps of the rule are kept, and the newest valid checkpoint with all after it; the others are removed."""
    root = tmp_path_factory.mktemp("kept")
    for step in steps:
        copy_as_step(valid_checkpoint, root / f"step-{step:08d}", step)
        if step in damaged:
            (root / f"step-{step:08d}" / "rng__0_0.distcp").write_bytes(b"")
    store = CheckpointStore(root, keep_last, every)
    valid = [step for step in steps if step not in damaged]
    removed = store.prune()
    left = store.steps()
    assert sorted([*left, *removed]) == steps
    since_valid = {step for step in steps if not valid or step >= max(valid)}  # without a valid one nothing is removed
    assert set(left) == steps_kept_by_rule(steps, keep_last, every) | since_valid
    assert {path.name for path in root.iterdir()} == {f"step-{step:08d}" for step in left}


@pytest.fixture(scope="module")
def valid_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(CheckpointStore(tmp_path_factory.mktemp("valid"), 1), 1)


def copy_as_step(source: Path, target: Path, step: int) -> None:
    shutil.copytree(source, target)
    meta = json.dumps(json.loads((target / "meta.json").read_text()) | {"step": step}).encode()
    (target / "meta.json").write_bytes(meta)
    manifest = json.loads((target / "manifest.json").read_text()) | {"step": step}
    manifest["files"]["meta.json"] = {"bytes": len(meta), "sha256": sha256(meta).hexdigest()}
    data = json.dumps(manifest).encode()
    (target / "manifest.json").write_bytes(data)
    (target / "COMMITTED").write_text(sha256(data).hexdigest())


def test_checkpoints_written_by_this_process_are_not_verified_again(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pruning after a save reads no files: what this process has written is valid."""
    for step in range(5):
        save(store, step)
    monkeypatch.setattr("hlat.checkpoint.protocol.store.verify_checkpoint", lambda _: pytest.fail("verified again"))
    assert store.prune() == [0, 1, 2]


def modification_times(root: Path) -> dict[str, int]:
    """Modification time of every file, in nanoseconds."""
    return {str(path.relative_to(root)): path.stat().st_mtime_ns for path in root.rglob("*")}


def test_a_required_step_is_opened_if_it_is_the_newest(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        save(store, step)
    assert_is_step(store.newest(3), 3)


def test_nothing_is_renamed_if_the_required_step_is_not_the_newest(store: CheckpointStore) -> None:
    """The error lists the newer checkpoints with what is wrong with them, and the earlier ones."""
    for step in (1, 2, 3, 4):
        save(store, step)
    (store.root / "step-00000003" / "rng__0_0.distcp").write_bytes(b"")
    (store.root / "step-00000004" / "COMMITTED").unlink()
    before = modification_times(store.root)
    with pytest.raises(CheckpointError) as caught:
        store.newest(2)
    message = str(caught.value)
    assert "step-00000004: COMMITTED is missing" in message and "step-00000003: rng__0_0.distcp has 0 bytes" in message
    assert "step-00000002: valid" in message and "earlier checkpoints: step-00000001" in message
    for step, named in ((1, "step-00000002: valid"), (3, "step-00000003: rng"), (7, "earlier checkpoints:")):
        with pytest.raises(CheckpointError, match=named):
            store.newest(step)
    assert modification_times(store.root) == before
    assert_is_step(store.newest(), 2)


def test_a_required_step_of_an_empty_store_is_an_error(store: CheckpointStore) -> None:
    with pytest.raises(
        CheckpointError, match=r"the newest checkpoint is not of step 5.*\n.*there is no earlier checkpoint"
    ):
        store.newest(5)
