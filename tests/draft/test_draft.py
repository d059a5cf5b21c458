"""A drafted recipe is one that hlat accepts, and what it says of corpus and machine is true."""

import json
import random
from pathlib import Path

import pytest
import yaml

import hlat
from hlat.config import load_recipe
from hlat.config.yaml_files import load_yaml
from hlat.data.prepare.preparation import prepare
from hlat.draft.drafting import MOST_EPOCHS, STATE_BYTES, _quoted, choose_sizes, draft_recipe
from hlat.draft.facts import Machine, look_at_corpus, look_at_texts
from hlat.draft.sources import source_names, source_paths
from hlat.model.counts import count_parameters, flops_per_token
from hlat.runtime.errors import DataError

GIB = 2**30
LAPTOP = Machine("a laptop", 1, 1e11, 8 * GIB, True)
EIGHT = Machine("NVIDIA H100 80GB HBM3", 8, 989e12, 80 * GIB, False)


def chinese(count: int) -> list[str]:
    rng = random.Random(3)
    words = ["机器", "学习", "语言", "模型", "数据", "训练", "河流", "城市", "春天", "，", "。"]
    return ["".join(rng.choice(words) for _ in range(rng.randrange(50, 400))) for _ in range(count)]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    """Chinese texts under the key ``content``."""
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"id": "x", "content": text}) + "\n" for text in chinese(600)), encoding="utf-8")
    return file


def test_size_and_tokens_of_a_corpus_are_those_that_preparing_it_finds(
    jsonl: Path, corpus: Path, tmp_path: Path
) -> None:
    """From a sample of a megabyte; the texts of both are alike, so it is off by a few per cent at most."""
    for number, path in enumerate((jsonl, corpus)):
        texts = look_at_texts(str(path))
        assert texts.column == (None if path is corpus else "content")
        file = tmp_path / f"{number}.yaml"
        file.write_text(draft_recipe([str(path)], name="mine", hours=0.02))
        recipe = load_recipe(file, [f"data.prepared_dir={tmp_path / f'data{number}'}"])
        manifest = prepare(recipe.data, tmp_path / f"data{number}").manifest
        found = sum(split.tokens for split in manifest.splits.values())
        assert texts.tokens(recipe.model.vocab_size, None) == pytest.approx(found, rel=0.05)
        whole = sum(len(text.encode()) for text in chinese(600)) if path is jsonl else None
        if whole is not None:
            assert texts.text_bytes == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize("machine", [LAPTOP, EIGHT], ids=lambda machine: machine.name)
@pytest.mark.parametrize("epoch", [10**6, 10**9, 10**12])
def test_the_numbers_keep_their_bounds(machine: Machine, epoch: int, corpus: Path) -> None:
    """Time, memory and epochs limit the run; more time is never a run with less compute."""
    texts, before = look_at_texts(str(corpus)), 0.0
    for hours in (0.1, 1.0, 24.0, 720.0):
        sizes = choose_sizes(texts, epoch, machine, hours, None, trained=False)
        assert sizes.tokens <= MOST_EPOCHS * epoch or sizes.steps == 1
        assert sizes.seconds <= hours * 3600 * 1.001
        assert sizes.parameters * STATE_BYTES <= 0.6 * machine.devices * machine.memory_bytes
        assert sizes.global_batch % machine.devices == 0
        assert (sizes.global_batch // machine.devices) % sizes.micro_batch == 0
        spent = sizes.parameters * sizes.tokens
        assert spent >= 0.7 * before, "shapes are discrete: the nearest one may be a third smaller"
        before = spent


def test_the_time_is_the_flops_over_the_rate(corpus: Path) -> None:
    texts = look_at_texts(str(corpus))
    sizes = choose_sizes(texts, 10**9, LAPTOP, 1.0, None, trained=False)
    model = load_recipe("quickstart", ["data.path=x"]).model.model_copy(update=sizes.model)
    assert count_parameters(model).total == sizes.parameters
    # Of small models a CPU reaches less: docs/notebook/quickstart.md has 36 % of 2.4 million parameters, 26 % of 1.0.
    share = 0.35 * min(1.0, sizes.parameters / 2.4e6) ** 0.5
    assert 0.1 < share < 0.35
    expected = sizes.tokens * flops_per_token(model, sizes.sequence_length) / (share * 1e11)
    assert sizes.seconds == pytest.approx(expected, rel=1e-3)


def test_a_recipe_for_several_devices_is_accepted(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hlat.draft.drafting.look_at_machine", lambda device: EIGHT)
    for model, zero in ((None, 1), ("llama-2-7b", 3)):
        file = tmp_path / f"{zero}.yaml"
        file.write_text(draft_recipe([str(corpus)], name="mine", hours=1.0, model=model))
        assert load_recipe(file, world=8).parallel.zero == zero


def test_every_number_has_a_reason_and_text_survives_quoting(tmp_path: Path) -> None:
    folder = tmp_path / "my texts: 春天 #1"
    folder.mkdir()
    (folder / "a.txt").write_text("春天来了。" * 4000, encoding="utf-8")
    text = draft_recipe([str(folder)], name="mine", hours=0.02)
    assert yaml.safe_load(text)["data"]["path"] == str(folder)
    lines = text.splitlines()
    for field in ("global_batch", "micro_batch", "lr", "steps"):
        number = next(number for number, line in enumerate(lines) if line.strip().startswith(f"{field}:"))
        assert "  # " in lines[number] or lines[number - 1].startswith("  # ")
    assert all(len(line) <= 80 for line in lines if str(folder) not in line), "comments break between words"


def test_what_cannot_be_used_is_said(tmp_path: Path, jsonl: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"words": "a b"}\n')
    with pytest.raises(DataError, match=r"(?s)no column 'text'; it has words.*--text-column"):
        look_at_texts(str(other))
    assert look_at_texts(str(other), "words").sample == ("a b",)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text("")
    with pytest.raises(DataError, match="nothing to train on"):
        look_at_texts(str(tmp_path / "empty"))
    with pytest.raises(hlat.HlatError, match=r"no such|no files|not"):
        look_at_texts(str(tmp_path / "none"))


def test_the_command_writes_a_recipe_that_trains(cli, corpus: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    done = cli("init", corpus, "--to", recipe, "--time", "0.01")
    assert done.returncode == 0, done.stderr
    assert "hlat train" in done.stdout
    again = cli("init", corpus, "--to", recipe)
    assert again.returncode == 3
    assert "exists" in again.stderr
    steps = ["training.steps=2", "schedule.warmup_steps=1", f"run.dir={tmp_path / 'run'}"]
    trained = cli("train", recipe, *steps)
    assert trained.returncode == 0, trained.stderr


@pytest.mark.parametrize(
    "text",
    [
        *(
            "true",
            "null",
            "~",
            "1e3",
            "0x1f",
            "a: b",
            "a #b",
            "a\nb",
            "it's",
            'a"b',
            "-x",
            "a\x7fb",
            "a\x85b",
            "a\u2028b",
        ),
        *("東京/é", "\U0001f600", "a\udcffb", "@x", "*x", "!x", "{a}", "[a]", "no", "2001-01-01", " x ", "a\\b", ""),
    ],
)
def test_a_name_is_written_so_that_yaml_reads_it_back(text: str) -> None:
    """Witness: hlat's reader of recipes and, for what it may hold, PyYAML's own; of "no" they differ by intent."""
    written = f"data: {{path: {_quoted(text)}}}"
    assert load_yaml(written) == {"data": {"path": text}}
    if text not in ("no", "a\udcffb"):
        assert yaml.safe_load(written) == {"data": {"path": text}}


def mixed_folder(folder: Path) -> dict[str, int]:
    """A folder of three formats, each with the text in another place; bytes of text by the ending."""
    texts, size = chinese(300), sum(len(text.encode()) for text in chinese(300))
    (folder / "deep").mkdir(parents=True)
    for number, text in enumerate(texts):
        (folder / "deep" / f"{number}.txt").write_text(text, encoding="utf-8")
    (folder / "t.csv").write_text("id,content\n" + "".join(f"x,{text}\n" for text in texts), encoding="utf-8")
    rows = "".join(json.dumps({"body": text}) + "\n" for text in texts * 2)
    (folder / "w.jsonl").write_text(rows, encoding="utf-8")
    (folder / "README").write_text("About these texts.")
    (folder / "old.zip").write_bytes(b"PK")
    return {"txt": size, "csv": size, "jsonl": 2 * size}


def test_a_mixed_folder_becomes_sources_that_a_run_takes(tmp_path: Path, cli) -> None:
    sizes = mixed_folder(tmp_path / "my texts")
    texts = look_at_corpus([str(tmp_path / "my texts")])
    assert [source.name for source in texts.sources] == ["my-texts-csv", "my-texts-jsonl", "my-texts-txt"]
    assert [source.column for source in texts.sources] == ["content", "body", None]
    assert {source.name[9:]: source.text_bytes for source in texts.sources} == pytest.approx(sizes, rel=0.05)
    file = tmp_path / "mine.yaml"
    file.write_text(draft_recipe([str(tmp_path / "my texts")], name="mine", hours=0.001), encoding="utf-8")
    assert "# 2 files in no source: README, old.zip" in file.read_text()
    words = (file, "training.steps=2", "schedule.warmup_steps=1", f"run.dir={tmp_path / 'run'}")
    for verb in ("check", "train"):
        done = cli(verb, *words)
        assert done.returncode == 0, done.stderr
    with pytest.raises(DataError, match=r"\{path: .*/\*\*/\*\.txt\}, .*`hlat init .*` drafts them"):
        (tmp_path / "my texts" / "old.zip").unlink()
        look_at_texts(str(tmp_path / "my texts"))


def test_many_paths_become_few_sources(tmp_path: Path) -> None:
    """Hundreds are one glob where the folder above them has nothing else; otherwise they are refused in a line."""
    for number in range(120):
        (tmp_path / f"f{number:03}").mkdir()
        (tmp_path / f"f{number:03}" / "a.jsonl").write_text(json.dumps({"text": f"text {number}"}))
        (tmp_path / f"f{number:03}" / "b.txt").write_text(f"text {number}")
    found, left_out = source_paths([str(path) for path in sorted(tmp_path.iterdir())])
    assert [source.path for source in found] == [f"{tmp_path}/**/*.jsonl", f"{tmp_path}/**/*.txt"]
    assert [len(source.files) for source in found] == [120, 120] and not left_out
    with pytest.raises(DataError) as caught:
        source_paths([str(path) for path in sorted(tmp_path.iterdir())[:60]])
    assert "and 117 more: more than the 16 sources" in str(caught.value) and len(str(caught.value)) < 1000
    few = [str(tmp_path / "f001" / "a.jsonl"), str(tmp_path / "f002" / "a.jsonl"), str(tmp_path / "f003")]
    assert source_names(source_paths(few)[0]) == ["a", "a-2", "f003-jsonl", "f003-txt"]
