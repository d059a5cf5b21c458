"""``hlat data``: the whole story of a corpus that is not clean, as commands tell it."""

import json

import pytest

BAD = ["{nonsense", '{"text": 7}', '{"other": "x"}']
STEERING = "\x1b[2Jevil [bold]markup[/bold]\r\x07 \x9b1m"


@pytest.fixture(scope="module")
def dirty(tmp_path_factory, tiny_recipe, corpus, cli):
    """A recipe of two sources with copies, unreadable rows and text that steers terminals; its data is in run/data."""
    folder = tmp_path_factory.mktemp("dirty")
    texts = [file.read_text() for file in sorted(corpus.iterdir())]
    for name, rows in (("a", [*texts[:40], None, ""]), ("b", [*texts[20:], *texts[:3], STEERING * 40])):
        lines = [json.dumps({"text": text}) for text in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines + (BAD if name == "b" else [])))
    (folder / "recipe.yaml").write_text(tiny_recipe)
    sources = ", ".join(f"{{path: {folder / name}.jsonl, name: source-{name}}}" for name in "ab")
    arguments = [f"data.sources=[{sources}]", f"run.dir={folder / 'run'}", "data.unreadable_rows=0.05"]
    done = cli("data", "prepare", folder / "recipe.yaml", *arguments)
    assert done.returncode == 0, done.stderr
    return folder, arguments, done.stdout


def test_prepare_tells_of_copies_and_unreadable_rows_by_source(dirty):
    _, _, said = dirty
    assert "3 of 89 rows could not be read and were left out: quarantine.jsonl lists them." in said
    assert "23 of 84 documents are exact copies of earlier ones and are kept; data.duplicates=drop leaves them" in said
    assert "source-b: 23 copies (" in said and "3 unreadable rows" in said and "source-a:" not in said


def test_too_many_unreadable_rows_are_an_error_that_names_them(dirty, cli):
    folder, arguments, _ = dirty
    done = cli("data", "prepare", folder / "recipe.yaml", *arguments, "data.unreadable_rows=0.03", "run.dir=other",
               cwd=folder)  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert "3 of 89 rows in all cannot be read, a share of 0.0337; data.unreadable_rows allows 0.03" in done.stderr
    assert f"{folder / 'b.jsonl'}, line 45: invalid JSON" in done.stderr and "data.unreadable_rows=0.034" in done.stderr


@pytest.mark.parametrize("named", ["recipe", "folder", "run"])
def test_show_for_people(dirty, cli, named):
    folder, arguments, _ = dirty
    words = {"recipe": ["recipe.yaml", *arguments], "folder": ["run/data"], "run": ["run"]}[named]
    done = cli("data", "show", *words, "--samples", "3", "--max-tokens", "800", cwd=folder)
    assert done.returncode == 0, done.stderr
    for said in ("source-a", "source-b", "512 to 1,023", "█", "validation: tokens per document", "begins]", "ends]"):
        assert said in done.stdout, said
    assert not set("\x1b\r\x07\x9b") & set(done.stdout)


def test_show_for_programs(dirty, cli):
    folder, _, _ = dirty
    told = json.loads(cli("data", "show", folder / "run", "--json", "--samples", "4", "--max-tokens", "50").stdout)
    assert [(row["name"], row["rows"], row["copies"], row["unreadable_rows"]) for row in told["rows"]] == [
        ("source-a", 42, 0, 0),
        ("source-b", 47, 23, 3),
    ]
    for split in told["splits"].values():
        buckets = split["lengths"]["buckets"]
        assert sum(bucket["documents"] for bucket in buckets) == split["documents"] > 0
        assert sum(bucket["tokens"] for bucket in buckets) == split["tokens"]
        assert sum(source["tokens"] for source in split["sources"]) == split["tokens"]
    assert len(told["samples"]) == 8
    for sample in told["samples"]:
        assert sum(passage["tokens"] for passage in sample["passages"]) == 50
        assert any(passage["begins"] for passage in sample["passages"])
        between = [(a["ends"], b["begins"]) for a, b in zip(sample["passages"], sample["passages"][1:], strict=False)]
        assert set(between) <= {(True, True)}
    assert told["quarantine"].endswith("quarantine.jsonl")


def test_verify_says_every_problem_and_changes_nothing(dirty, cli, tmp_path):
    folder, arguments, _ = dirty
    done = cli("data", "verify", folder / "recipe.yaml", *arguments)
    assert done.returncode == 0 and "is whole" in done.stdout, done.stderr
    copy = tmp_path / "data"
    copy.mkdir()
    for file in (folder / "run" / "data").rglob("*"):
        if file.is_file():
            (copy / file.relative_to(folder / "run" / "data")).parent.mkdir(exist_ok=True)
            (copy / file.relative_to(folder / "run" / "data")).write_bytes(file.read_bytes())
    shard = copy / "train-00000.bin"
    shard.write_bytes(b"\xff\xff" + shard.read_bytes()[2:])
    (copy / "validation-documents.bin").unlink()
    (copy / "quarantine.jsonl").write_text("")
    (copy / "tokenizer" / "tokenizer.json").write_text("{}")
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    done = cli("data", "verify", copy)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    for said in (
        "5 problems", "tokenizer", "validation-documents.bin: is missing", "train-00000.bin: the checksum differs",
        "token 65535 at 0 is outside the vocabulary of 320", "quarantine.jsonl: the checksum differs",
    ):  # fmt: skip
        assert said in done.stderr, (said, done.stderr)
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    done = cli("data", "verify", folder / "recipe.yaml", *arguments, "data.duplicates=drop", "data.shard_tokens=7")
    assert done.returncode == 2 and "data.duplicates: prepared with keep, now drop" in done.stderr
    assert "data.shard_tokens: prepared with 100000000, now 7" in done.stderr
    done = cli("data", "verify", tmp_path / "data" / "tokenizer")
    assert done.returncode == 2 and "no prepared data here" in done.stderr


def test_parts_on_several_machines(dirty, cli):
    folder, arguments, _ = dirty
    recipe = [folder / "recipe.yaml", *arguments, "data.duplicates=drop"]
    refused = cli("data", "prepare", *recipe, "--part", "1/2")
    assert refused.returncode == 2 and "hlat data tokenizer RECIPE --to FOLDER" in refused.stderr
    for part in ("0/2", "3/2", "2", "a/b"):
        assert "Write --part 2/3" in cli("data", "prepare", *recipe, "--part", part).stderr
    assert cli("data", "tokenizer", *recipe, "--to", folder / "tokenizer").returncode == 0
    recipe.append(f"data.tokenizer.path={folder / 'tokenizer'}")
    whole = cli("data", "prepare", *recipe, f"data.prepared_dir={folder / 'whole'}")
    assert whole.returncode == 0, whole.stderr
    recipe.append(f"data.prepared_dir={folder / 'merged'}")
    first = cli("data", "prepare", *recipe, "--part", "1/2")
    assert first.returncode == 0 and "part 1 of 2: 1 of 2 files" in first.stdout, first.stderr
    refused = cli("data", "merge", *recipe)
    assert refused.returncode == 2 and "part 2 of 2 is missing" in refused.stderr
    assert cli("data", "prepare", *recipe, "--part", "2/2").returncode == 0
    merged = cli("data", "merge", *recipe)
    assert merged.returncode == 0, merged.stderr
    said = _without_progress(merged.stdout).replace("merged 2 parts", "prepared").replace("merged", "whole")
    assert said == _without_progress(whole.stdout)
    again = cli("data", "merge", recipe[0], folder / "merged-part-2-of-2", folder / "merged-part-1-of-2", *recipe[1:])
    assert again.returncode == 0, again.stderr
    for file in (folder / "whole").rglob("*"):
        if file.is_file():
            assert (folder / "merged" / file.relative_to(folder / "whole")).read_bytes() == file.read_bytes()


def _without_progress(output: str) -> str:
    """Leave out the lines that a slow machine prints meanwhile."""
    return "".join(line for line in output.splitlines(keepends=True) if not line.startswith("prepare: "))


def test_one_bit_of_a_manifest_or_of_boundaries_is_an_error_without_a_traceback(dirty, cli):
    folder, _, _ = dirty
    for name, place in (("manifest.json", 345), ("validation-documents.bin", 17)):
        file = folder / "run" / "data" / name
        right = file.read_bytes()
        file.write_bytes(right[:place] + bytes([right[place] ^ 1]) + right[place + 1 :])
        for verb in ("show", "verify"):
            done = cli("data", verb, folder / "run")
            assert done.returncode == 2 and name in done.stderr and "Traceback" not in done.stderr, done.stderr
        file.write_bytes(right)
