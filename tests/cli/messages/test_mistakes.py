"""Every mistake of the table is answered by one message that says what, where, why and what would work."""

from pathlib import Path
from subprocess import CompletedProcess

import pyarrow as pa
import pytest
from pyarrow import parquet

from hlat.data.tokenizers.training import train_bpe
from tests.cli.messages.mistakes import MISTAKES, Mistake
from tests.support.commands import hlat_in_turn


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files that the commands of the table name."""
    folder = tmp_path_factory.mktemp("mistakes")
    texts = {
        "rows.jsonl": '{"text": "one", "id": 1}\n{"text": "two", "id": 2}\n',
        "broken_rows.jsonl": "{text: one}\n",
        "short.txt": "0123456789",
        "fifty.txt": "some words" * 5,
        "xlsx.xlsx": "x",
        "zip.zip": "x",
        "damaged.parquet": "PAR1 and no more",
        "not_yaml.yaml": "run: {name: a\n",
        "list_yaml.yaml": "- run\n",
        "twice.yaml": "run: {name: a}\nmodel: {preset: tiny-1m}\nrun: {name: b}\n",
        "empty.yaml": "",
        "other_ending.txt": "model: {preset: tiny-1m}\ndata: {path: x}\ntraining: {stepps: 2}\n",
        "no_break.yaml": "run:\u00a0{name: x}\nmodel: {preset: tiny-1m}\ndata: {path: x}\ntraining: {steps: 2}\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "binary.yaml").write_bytes(bytes(range(256)))
    for name in ("empty_folder", "step-00000004", "run_a"):
        (folder / name).mkdir()
    (folder / "run_a" / "attempts.jsonl").touch()
    parquet.write_table(pa.table({"text": ["one"], "id": [1]}), folder / "parquet.parquet")
    train_bpe(iter(["some words"]), 300, "auto").save(folder / "tokenizer")
    return {path.stem: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def answers(
    files: dict[str, Path], corpus: Path, tiny_recipe: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[CompletedProcess[str], Path]]:
    """Each mistake's command, and the folder in which it ran."""
    recipe = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    recipe.write_text(tiny_recipe)
    commands = []
    for mistake in MISTAKES:
        folder, words = tmp_path_factory.mktemp("mistake"), mistake.command
        for name, path in files.items():
            words = words.replace(f"{{{name}}}", str(path))
        good = [recipe, f"data.path={corpus}", f"run.dir={folder / 'run'}", "tracking.console=plain"]
        arguments: list[str | Path] = []
        for word in words.replace("{kind: ", "{kind:\u00a0").split(" "):
            arguments += good if word == "RECIPE" else [word.replace("{kind:\u00a0", "{kind: ")]
        commands.append((arguments, folder))
    done = zip(hlat_in_turn(commands), (folder for _, folder in commands), strict=True)
    return dict(zip((mistake.name for mistake in MISTAKES), done, strict=True))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake(mistake: Mistake, answers: dict[str, tuple[CompletedProcess[str], Path]]) -> None:
    done, folder = answers[mistake.name]
    said = " ".join(done.stderr.replace("│", " ").split())
    assert done.returncode == mistake.code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stdout + done.stderr
    for text in mistake.says:
        assert " ".join(text.split()) in said, (text, said)
    assert not any(
        word in said
        for word in ("unicode string", "input should", "Input should", "Value error", "pydantic", "unmarshal")
    )
    assert not (folder / "run").exists(), "a refused command writes nothing"


def test_the_table_is_long_and_has_no_line_twice() -> None:
    assert len(MISTAKES) >= 60 and len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)


def test_a_rank_of_unknown_how_many_is_refused(cli, recipe_file, tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    done = cli("train", recipe_file, *tiny, cwd=tmp_path)
    assert done.returncode == 2 and "RANK=1 is set, and WORLD_SIZE is not" in done.stderr, done.stderr
    assert "hlat train --nproc N" in done.stderr and not (tmp_path / "run").exists()


def test_a_wrong_number_of_processes_of_torchrun_is_set_by_its_own_options(
    cli, recipe_file, tiny, tmp_path, monkeypatch
) -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "a", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "0"}
    for name, value in (torchrun | {"WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}).items():
        monkeypatch.setenv(name, value)
    done = cli("train", recipe_file, *tiny, "parallel.tensor=2", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "The number of processes is set by torchrun's --nproc-per-node and --nnodes." in done.stderr
