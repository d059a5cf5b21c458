"""What a store gives back, and what it keeps."""

import json
import shutil
import warnings
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from hlat.checkpoint.format import replicated_chunks
from hlat.checkpoint.protocol import CheckpointStore, open_checkpoint, read_meta, resolve, verify
from hlat.runtime import CheckpointError
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
def test_any_bits_come_back(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], dtype: torch.dtype, seed: int
) -> None:
    """NaN payloads, infinities, denormals: whatever the bits."""
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


def test_an_empty_store_has_nothing(store: CheckpointStore) -> None:
    assert store.newest() is None
    assert store.steps() == []
    assert store.prune() == []


def test_loading_a_prefix(store: CheckpointStore) -> None:
    loaded = open_checkpoint(save(store, 3)).load("optimizer.")
    assert_equal(loaded, {k.removeprefix("optimizer."): v for k, v in state(3).items() if k.startswith("optimizer.")})


def test_what_does_not_fit_is_listed_at_once(store: CheckpointStore) -> None:
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


def test_the_files_are_dcp_files(store: CheckpointStore) -> None:
    """Torch's own reader, with its own planner, finds the same tensors."""
    path = save(store, 5)
    found = {name: torch.zeros_like(tensor).contiguous() for name, tensor in state(5).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=path, no_dist=True)
    assert_equal(found, state(5))


def test_the_same_state_gives_the_same_index(tmp_path: Path) -> None:
    """No path, host, user or time gets into a checkpoint by way of the index."""
    first = save(CheckpointStore(tmp_path / "a", 1), 1)
    second = save(CheckpointStore(tmp_path / "b" / "c", 1), 1)
    assert (first / ".metadata").read_bytes() == (second / ".metadata").read_bytes()
    assert str(tmp_path).encode() not in b"".join(p.read_bytes() for p in first.iterdir())


def test_large_state_is_spread_over_files(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hlat.checkpoint.format.writer._FILE_BYTES", 100)
    path = save(store, 2)
    assert len(list(path.glob("model__0_*.distcp"))) == 4
    assert verify(path) == []
    assert_is_step(store.newest(), 2)


def test_files_travel_with_the_checkpoint(store: CheckpointStore, tmp_path: Path) -> None:
    source = tmp_path / "source.json"
    source.write_bytes(bytes(range(256)) * 10_000)
    path = save(store, 1, {"tokenizer/tokenizer.json": source, "tokenizer/deep/er/a.txt": source})
    source.unlink()
    assert (path / "tokenizer" / "deep" / "er" / "a.txt").read_bytes() == bytes(range(256)) * 10_000
    assert verify(path) == []


@pytest.mark.parametrize("name", ["../a", "/a", "a/../../b", "meta.json", "manifest.json", "COMMITTED"])
def test_files_cannot_leave_the_checkpoint_or_replace_its_own(
    store: CheckpointStore, tmp_path: Path, name: str
) -> None:
    with pytest.raises(CheckpointError, match="plain relative path"):
        save(store, 1, {name: tmp_path / "source"})
    assert store.steps() == []


def test_a_step_saved_again_is_replaced(store: CheckpointStore) -> None:
    save(store, 1)
    store.save(1, replicated_chunks({"model.new": torch.ones(2)}), {"step": 1, "new": True})
    newest = store.newest()
    assert newest is not None and newest.meta["new"]
    assert_equal(newest.load(""), {"model.new": torch.ones(2)})
    assert [path.name for path in store.root.iterdir()] == ["step-00000001"]


def test_resolve_takes_what_people_type(store: CheckpointStore, tmp_path: Path) -> None:
    for step in (5, 100_000_000, 20):
        save(store, step)
    newest = store.root / "step-100000000"
    assert resolve(tmp_path / "run") == resolve(store.root) == resolve(newest) == newest
    assert resolve(store.root / "step-00000005") == store.root / "step-00000005"
    renamed = store.root.parent / "best"
    shutil.copytree(newest, renamed)
    assert resolve(renamed) == renamed
    assert read_meta(resolve(renamed))["step"] == 100_000_000


def test_resolve_says_what_is_wrong(tmp_path: Path) -> None:
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
    """A reader beside a running save leaves its staging folder alone."""
    save(store, 1)
    staging = store.root / ".staging-step-00000002"
    staging.mkdir()
    resolve(store.root.parent)
    assert staging.exists()


@pytest.mark.parametrize("text", ["", "[]", "{", "nul"])
def test_meta_that_is_no_object(store: CheckpointStore, text: str) -> None:
    path = save(store, 1)
    (path / "meta.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"meta\.json"):
        read_meta(path)


def test_meta_is_json_and_nothing_else(store: CheckpointStore) -> None:
    path = save(store, 1)
    assert json.loads((path / "meta.json").read_text()) == {"step": 1, "text": "é1"}
    with pytest.raises(ValueError, match="JSON"):
        store.save(2, [], {"loss": float("nan")})
    assert store.steps() == [1]


def kept_by_rule(steps: list[int], keep_last: int, every: int | None) -> set[int]:
    return set(steps[-keep_last:]) | {step for step in steps if every and step % every == 0}


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(st.integers(0, 60), unique=True, max_size=8).map(sorted),
    keep_last=st.integers(1, 4),
    every=st.none() | st.integers(1, 20),
    damaged=st.sets(st.integers(0, 60)),
    fresh=st.booleans(),
)
def test_retention(
    tmp_path_factory: pytest.TempPathFactory,
    whole: Path,
    steps: list[int],
    keep_last: int,
    every: int | None,
    damaged: set[int],
    fresh: bool,
) -> None:
    """The rule's steps stay, and the newest whole one stays; of the rest nothing that is older than that stays."""
    root = tmp_path_factory.mktemp("kept")
    for step in steps:
        copy_as_step(whole, root / f"step-{step:08d}", step)
        if step in damaged:
            (root / f"step-{step:08d}" / "rng__0_0.distcp").write_bytes(b"")
    store = CheckpointStore(root, keep_last, every)
    sound = [step for step in steps if step not in damaged]
    removed = store.prune()
    left = store.steps()
    assert sorted([*left, *removed]) == steps
    assert set(left) >= kept_by_rule(steps, keep_last, every)
    assert any(step in left for step in sound) or not sound
    if sound and max(sound) in kept_by_rule(steps, keep_last, every):
        assert set(left) == kept_by_rule(steps, keep_last, every)
    elif sound:
        assert max(sound) in left and not any(
            step < max(sound) and step not in kept_by_rule(steps, keep_last, every) for step in left
        )
    assert {path.name for path in root.iterdir()} == {f"step-{step:08d}" for step in left}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(CheckpointStore(tmp_path_factory.mktemp("whole"), 1), 1)


def copy_as_step(source: Path, target: Path, step: int) -> None:
    shutil.copytree(source, target)
    meta = json.dumps(json.loads((target / "meta.json").read_text()) | {"step": step}).encode()
    (target / "meta.json").write_bytes(meta)
    manifest = json.loads((target / "manifest.json").read_text()) | {"step": step}
    manifest["files"]["meta.json"] = {"bytes": len(meta), "sha256": sha256(meta).hexdigest()}
    data = json.dumps(manifest).encode()
    (target / "manifest.json").write_bytes(data)
    (target / "COMMITTED").write_text(sha256(data).hexdigest())


def test_the_verified_are_not_read_again(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pruning after a save costs no reading: what this process wrote is known to be whole."""
    for step in range(5):
        save(store, step)
    monkeypatch.setattr("hlat.checkpoint.protocol.store.verify", lambda _: pytest.fail("read again"))
    assert store.prune() == [0, 1, 2]


def contents_of(root: Path) -> dict[str, int]:
    """Every file and when it was changed last."""
    return {str(path.relative_to(root)): path.stat().st_mtime_ns for path in root.rglob("*")}


def test_a_required_step_is_taken_where_it_is_the_newest(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        save(store, step)
    assert_is_step(store.newest(3), 3)


def test_where_the_required_step_is_not_the_newest_nothing_is_touched(store: CheckpointStore) -> None:
    """Every newer one is named with what is wrong with it, and what there is before."""
    for step in (1, 2, 3, 4):
        save(store, step)
    (store.root / "step-00000003" / "rng__0_0.distcp").write_bytes(b"")
    (store.root / "step-00000004" / "COMMITTED").unlink()
    before = contents_of(store.root)
    with pytest.raises(CheckpointError) as caught:
        store.newest(2)
    message = str(caught.value)
    assert "step-00000004: COMMITTED is missing" in message and "step-00000003: rng__0_0.distcp has 0 bytes" in message
    assert "step-00000002: valid" in message and "earlier checkpoints: step-00000001" in message
    for step, named in ((1, "step-00000002: valid"), (3, "step-00000003: rng"), (7, "earlier checkpoints:")):
        with pytest.raises(CheckpointError, match=named):
            store.newest(step)
    assert contents_of(store.root) == before
    assert_is_step(store.newest(), 2)


def test_a_required_step_of_a_run_that_has_none(store: CheckpointStore) -> None:
    with pytest.raises(
        CheckpointError, match=r"the newest checkpoint is not of step 5.*\n.*there is no earlier checkpoint"
    ):
        store.newest(5)
