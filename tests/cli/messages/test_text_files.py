"""Files that are not what a recipe takes them for: ``hlat check`` says what they are, and what to do about it."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from hlat.config import RecipeError, load_recipe
from hlat.launch.start_examination import load_and_check
from hlat.launch.start_place import Here

ROWS = [{"text": "some words", "id": 1}, {"text": "more words", "id": 2}]
LINES = "\n".join(map(json.dumps, ROWS)) + "\n"
FILES = {
    "list.jsonl": json.dumps(ROWS),
    "indented.json": json.dumps(ROWS, indent=1),
    "cut.jsonl": '{"text": "a}\n' + LINES,
    "plain.jsonl.gz": LINES,
    "other.parquet": LINES,
    "zst.gz": b"\x28\xb5\x2f\xfd0000",
    "latin.txt": "Größe ".encode("latin-1") * 40_000,
    "binary.txt": bytes(range(1, 256)) * 300,
    "nul.txt": b"some\0words",
    "numbers.jsonl": '{"text": 3, "body": "some words", "title": "x", "id": 1}\n',
    "row_of_number.jsonl": '{"text": "some words"}\n{"text": 5}\n',
    "semicolon.csv": "hello;5\nthere;6\n",
    "headless.csv": "hello there,5\nmore,6\n",
    "tabs.csv": "text\tid\nhello\t5\n",
}
SAYS = {
    "list.jsonl": ("one JSON list, not lines of objects", "jq -c '.[]' FILE > NEW.jsonl"),
    "indented.json": ("one JSON list, not lines of objects", "jq -c"),
    "cut.jsonl": ("line 1: invalid JSON: ", " at column 13. Each line must be one JSON object."),
    "plain.jsonl.gz": ("not what its ending .gz says: it begins like plain text", "Give it the ending"),
    "other.parquet": ("not what its ending .parquet says: it begins like plain text",),
    "zst.gz": ("it begins like zstd data",),
    "latin.txt": ("invalid UTF-8 at byte 2", "iconv -f ENCODING -t UTF-8 FILE > NEW"),
    "binary.txt": ("invalid UTF-8 at byte 127", "if it is not text, name the text files with a glob"),
    "nul.txt": ("a zero byte (NUL) at byte 4",),
    "numbers.jsonl": ("'text' holds a number, not text", "to a key of strings. Here that is: body, title."),
    "row_of_number.jsonl": ("line 2: 'text' holds a number, not text", "has no text: mend or", "data.unreadable_rows"),
    "semicolon.csv": (
        "no column 'text'",
        "divided by ';', and csv files by ','",
        "a first line that names the columns",
    ),
    "headless.csv": ("it has hello there, 5", "The first line of the file names its columns."),
    "tabs.csv": ("divided by '\\t', and csv files by ','",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("files")
    for name, content in FILES.items():
        (made / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (made / "link.txt").symlink_to("gone.txt")
    (made / "good.jsonl").write_text(LINES)
    with gzip.open(made / "good.jsonl.gz", "wt") as file:
        file.write(LINES)
    parquet.write_table(pa.table({"text": ["one"]}), made / "good.parquet")
    (made / "good.txt").write_text("ä" * 100_000)  # a character of two bytes is cut at the end of what is looked at
    (made / "odd.txt").write_text("a" + "ä" * 100_000)
    return made


def check(recipe_file: Path, tiny: list[str], run_dir: Path, path: str, *more: str):
    overrides = [*tiny, f"data.path={path}", f"run.dir={run_dir}", "data.validation.fraction=0", *more]
    return load_and_check(lambda: load_recipe(recipe_file, overrides), Here())


@pytest.mark.parametrize("name", FILES)
def test_what_it_is_instead(name, folder, recipe_file, tiny, tmp_path):
    with pytest.raises(RecipeError) as caught:
        check(recipe_file, tiny, tmp_path / "new", str(folder / name))
    message = str(caught.value)
    assert all(words in message for words in SAYS[name]), message
    assert "truncated" not in message and "codec" not in message


@pytest.mark.parametrize("name", ["good.jsonl", "good.jsonl.gz", "good.parquet", "good.txt", "odd.txt"])
def test_good_files_are_not_suspected(name, folder, recipe_file, tiny, tmp_path):
    check(recipe_file, tiny, tmp_path / "new", str(folder / name), "data.sequence_length=2")


def test_text_that_may_be_left_out_is_not_refused_before(folder, recipe_file, tiny, tmp_path):
    check(recipe_file, tiny, tmp_path / "new", str(folder / "latin.txt"), "data.unreadable_rows=0.5")


def test_a_link_to_nothing_and_a_variable_are_named(folder, recipe_file, tiny, tmp_path):
    with pytest.raises(RecipeError, match=r"a link to gone\.txt, which does not exist\. Correct the link\."):
        check(recipe_file, tiny, tmp_path / "new", str(folder / "link.txt"))
    with pytest.raises(RecipeError, match="Environment variables are not filled in here"):
        check(recipe_file, tiny, tmp_path / "new", "$DATA/texts.jsonl")
