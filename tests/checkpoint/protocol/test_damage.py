"""Every kind of damage to every file of a checkpoint is reported, and the previous checkpoint is used."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlat.checkpoint.protocol.reader import resolve, verify_checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.runtime.errors import CheckpointError
from tests.support.checkpoint.saved_states import assert_is_step, save

FILES = [
    ".metadata",
    "COMMITTED",
    "manifest.json",
    "meta.json",
    "model__0_0.distcp",
    "optimizer__0_0.distcp",
    "rng__0_0.distcp",
    "tokenizer/tokenizer.json",
]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three valid checkpoints, each with a different tokenizer."""
    folder = tmp_path_factory.mktemp("template")
    store = CheckpointStore(folder / "checkpoints", keep_last=3)
    for step in (1, 2, 3):
        tokenizer = folder / f"tokenizer-{step}.json"
        tokenizer.write_text(f'{{"step": {step}}}')
        save(store, step, {"tokenizer/tokenizer.json": tokenizer})
    assert (
        sorted(
            str(p.relative_to(store.root / "step-00000003"))
            for p in store.root.glob("step-00000003/**/*")
            if p.is_file()
        )
        == FILES
    )
    return folder / "checkpoints"


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    shutil.copytree(template, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def delete(path: Path) -> None:
    path.unlink()


def copy_from_older_step(path: Path) -> None:
    relative = path.relative_to(path.parents[path.parts[::-1].index("step-00000003")])
    older = Path(*(part.replace("step-00000003", "step-00000002") for part in path.parts))
    assert older.read_bytes() != path.read_bytes(), f"{relative} should differ between steps"
    shutil.copyfile(older, path)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_link(path: Path) -> None:
    moved = path.parents[len(path.parts) - 1 - path.parts.index("step-00000003")] / "elsewhere"
    path.rename(moved)
    path.symlink_to(moved)


DAMAGES = [flip_a_bit, truncate, empty, append, delete, copy_from_older_step, replace_by_folder]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_reported_and_the_previous_checkpoint_is_used(
    root: Path, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    bad = root / "step-00000003"
    if (name, damage) == (".metadata", copy_from_older_step):
        flip_a_bit(bad / name)  # the index of two steps is the same, byte for byte
    else:
        damage(bad / name)
    problems = verify_checkpoint(bad)
    assert problems and name in problems[0], problems

    with pytest.raises(CheckpointError, match="damaged"):
        resolve(bad)
    assert resolve(root.parent) == root / "step-00000002", "readers use the previous checkpoint too, and rename nothing"
    assert [str(bad) in message for message in warnings_in(caplog)] == [True]
    assert bad.exists()

    reports: list[tuple[Path, list[str]]] = []
    store = CheckpointStore(root, 3, on_damage=lambda folder, problems: reports.append((folder, problems)))
    assert_is_step(store.newest(), 2)
    assert reports == [(root / "step-00000003.bad", problems)]
    assert store.steps() == [1, 2], "the damaged checkpoint is not read again"
    assert_is_step(store.newest(), 2)
    assert len(reports) == 1
    save(store, 3)
    assert_is_step(store.newest(), 3)


def test_a_symbolic_link_is_damage(root: Path) -> None:
    replace_by_link(root / "step-00000003" / "meta.json")
    assert verify_checkpoint(root / "step-00000003") == ["meta.json is a symbolic link"]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_changed_byte_is_reported(
    template: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("flip") / "step-00000003"
    shutil.copytree(template / "step-00000003", folder)
    path = folder / data.draw(st.sampled_from(FILES))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    assert verify_checkpoint(folder)


def test_swapped_files_are_reported(root: Path) -> None:
    model, optimizer = (root / "step-00000003" / f"{kind}__0_0.distcp" for kind in ("model", "optimizer"))
    kept = model.read_bytes()
    model.write_bytes(optimizer.read_bytes())
    optimizer.write_bytes(kept)
    assert [problem.split()[0] for problem in verify_checkpoint(root / "step-00000003")] == [model.name, optimizer.name]


def test_exchanged_folders_are_reported(root: Path) -> None:
    (root / "step-00000003").rename(root / "aside")
    (root / "step-00000002").rename(root / "step-00000003")
    assert verify_checkpoint(root / "step-00000003") == ["the folder is named step-00000003, its content is of step 2"]
    assert verify_checkpoint(root / "aside") == [], "a folder with another name belongs to the user"


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_damage_is_a_one_line_warning_for_readers(root: Path) -> None:
    """In a separate process, as users see it: without source line and warning category."""
    flip_a_bit(root / "step-00000003" / "model__0_0.distcp")
    program = (
        f"from pathlib import Path; from hlat.checkpoint.protocol.reader import resolve; resolve(Path({str(root)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    expected = "step-00000003 is damaged and skipped: model__0_0.distcp does not match its checksum"
    assert done.stderr == f"{root}/{expected}\n" and done.stdout == ""


def test_the_newest_valid_checkpoint_is_found_after_several_damaged_ones(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    delete(root / "step-00000003" / "meta.json")
    append(root / "step-00000002" / "rng__0_0.distcp")
    (root / "step-00000002.bad").mkdir()
    assert_is_step(CheckpointStore(root, 3).newest(), 1)
    assert ["step-00000003.bad" in message for message in warnings_in(caplog)] == [True, False]
    assert (root / "step-00000002.bad.2").exists()


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(root: Path) -> None:
    for step in (1, 2, 3):
        flip_a_bit(root / f"step-{step:08d}" / "model__0_0.distcp")
    reports: list[Path] = []
    for _ in range(2):  # the next restart fails too
        with pytest.raises(CheckpointError, match=r"step-00000001\.bad.*step-00000003\.bad.*start over"):
            CheckpointStore(root, 3, on_damage=lambda folder, _: reports.append(folder)).newest()
    assert len(reports) == 3
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        resolve(root)


def test_other_files_and_folders_are_left_alone(root: Path) -> None:
    for name in ("notes", "step-latest", "step-3"):
        (root / name).mkdir()
    (root / "step-00000009").write_text("a file")
    reports: list[Path] = []
    assert_is_step(CheckpointStore(root, 3, on_damage=lambda folder, _: reports.append(folder)).newest(), 3)
    assert (root / "notes").exists() and (root / "step-3").exists()
    assert reports == [root / "step-00000009.bad"]
