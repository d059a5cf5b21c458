"""``hlat checkpoint`` on the checkpoints of a real run: what is there, what is wrong with it, what may go."""

import json
import shutil
from pathlib import Path

import pytest

from hlat.training.start import run_lock


@pytest.fixture(scope="module")
def trained(cli, tiny_recipe, corpus, tmp_path_factory):
    """A run with four checkpoints, at steps 10 to 40."""
    folder = tmp_path_factory.mktemp("checkpoints")
    (folder / "recipe.yaml").write_text(tiny_recipe)
    more = ["checkpoint.keep_last=4", "evaluation.every_steps=null"]
    done = cli("train", folder / "recipe.yaml", f"data.path={corpus}", f"run.dir={folder / 'run'}", *more)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def _steps(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_what_is_there_is_listed_without_changing_it(cli, run):
    folder = run / "checkpoints"
    (folder / "step-00000020").rename(folder / "step-00000020.bad")
    (folder / ".staging-step-00000050").mkdir()
    (folder / "step-00000010" / "COMMITTED").write_text("0" * 64)
    before = _steps(run)
    done = cli("checkpoint", "list", run)
    assert done.returncode == 0, done.stderr
    states = [line.split()[0:2] for line in done.stdout.splitlines()]
    assert [name for name, _ in states] == [
        "step-00000010", "step-00000020.bad", "step-00000030", "step-00000040", ".staging-step-00000050",
    ]  # fmt: skip
    assert states[0][1] == "damaged:" and states[1][1] == "set" and states[4][1] == "unfinished"
    entries = json.loads(cli("checkpoint", "list", folder, "--json").stdout)
    last = next(entry for entry in entries if entry["step"] == 40)
    assert last["tokens"] == 40 * 8 * 32 and last["state"] == "committed"
    files = [file for file in Path(last["path"]).rglob("*") if file.is_file()]
    listed = [file for file in files if file.name not in ("manifest.json", "COMMITTED")]
    assert last["bytes"] == sum(file.stat().st_size for file in listed)
    assert _steps(run) == before


def test_show_tells_what_is_in_the_newest(cli, run):
    done = cli("checkpoint", "show", run)
    assert done.returncode == 0 and "step 40, samples 320, tokens 10,240" in done.stdout, done.stderr
    told = json.loads(cli("checkpoint", "show", run, "--json").stdout)
    assert told["step"] == 40 and told["recipe"]["model"]["layers"] == 2
    tensors = told["tensors"]
    assert tensors["model"]["elements"] == tensors["optimizer.exp_avg"]["elements"] == 45_216
    assert tensors["model"]["dtypes"] == ["float32"]


def test_show_and_list_notice_what_a_checkpoint_says_of_itself(cli, run):
    meta = run / "checkpoints" / "step-00000040" / "meta.json"
    meta.write_text(meta.read_text().replace('"tokens": 10240', '"tokens": "many"'))
    listed = cli("checkpoint", "list", run)
    assert listed.returncode == 0 and "step-00000040            damaged: meta.json does not match" in listed.stdout
    assert "step 30," in cli("checkpoint", "show", run).stdout, "the newest that can be told of"
    alone = cli("checkpoint", "show", meta.parent)
    assert alone.returncode == 2 and "meta.json does not match its checksum" in alone.stderr


def test_verify_names_every_damaged_one(cli, run):
    whole = cli("checkpoint", "verify", run)
    assert whole.returncode == 0 and whole.stdout.count(" is whole: ") == 4, whole.stderr
    for step in (10, 30):
        file = run / "checkpoints" / f"step-000000{step}" / "model__0_0.distcp"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    damaged = cli("checkpoint", "verify", run)
    assert damaged.returncode == 2, damaged.stderr
    assert "2 of 4 checkpoints damaged" in damaged.stderr
    assert damaged.stdout.count("is damaged: model__0_0.distcp does not match its checksum") == 2
    assert damaged.stdout.count(" is whole: ") == 2 and len(_steps(run)) == 4
    one = cli("checkpoint", "verify", run / "checkpoints" / "step-00000030")
    assert one.returncode == 2 and "1 of 1" in one.stderr


def test_prune_keeps_what_is_asked_and_the_newest_whole_one(cli, run):
    file = run / "checkpoints" / "step-00000040" / "model__0_0.distcp"
    file.write_bytes(b"")
    (run / "checkpoints" / ".staging-step-00000050").mkdir()
    told = cli("checkpoint", "prune", run, "--keep-last", "1", "--dry-run")
    assert told.returncode == 0 and told.stdout.strip() == "would remove: 10, 20", told.stderr
    assert len(_steps(run)) == 5
    done = cli("checkpoint", "prune", run, "--keep-last", "1", "--keep-every", "20")
    assert done.returncode == 0 and done.stdout.strip() == "removed: 10", done.stderr
    assert _steps(run) == ["step-00000020", "step-00000030", "step-00000040"]


@pytest.mark.parametrize("path", [".", "checkpoints", "checkpoints/step-00000040/.."])
def test_prune_does_not_touch_a_run_that_is_being_trained(cli, run, path):
    with run_lock(run):
        done = cli("checkpoint", "prune", run / path, "--keep-last", "1")
        told = cli("checkpoint", "prune", run / path, "--keep-last", "1", "--dry-run")
    assert done.returncode != 0 and "is being trained and prunes its own checkpoints" in done.stderr
    assert told.stdout.strip() == "would remove: 10, 20, 30"
    assert len(_steps(run)) == 4


def test_other_folders_are_refused(cli, run, tmp_path):
    nothing = cli("checkpoint", "list", tmp_path / "none")
    assert nothing.returncode == 2 and "no such folder" in nothing.stderr
    models = tmp_path / "projects" / "models"
    (models / ".staging-model").mkdir(parents=True)
    other = cli("checkpoint", "prune", models, "--keep-last", "1")
    assert other.returncode == 2 and "no checkpoint there" in other.stderr
    assert (models / ".staging-model").exists() and not (models.parent / ".lock").exists()
    assert cli("checkpoint", "verify", run / "checkpoints" / "step-00000999").returncode == 2
    one = cli("checkpoint", "prune", run / "checkpoints" / "step-00000040", "--keep-last", "1")
    assert one.returncode == 2 and "is a single checkpoint" in one.stderr
