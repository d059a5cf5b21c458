"""Output is bounded: of sources, files, ranks and presets the first are named, and the others are counted."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from hlat.config.model_base import PRESETS
from hlat.launch.preflight.judgement import CHECKS, Gathered, judge
from hlat.reporting import write_report
from hlat.runtime.terminal import first_of, listed
from tests.support.commands import hlat, hlat_in_turn

# Preparing 400 sources takes seconds; what grows with 60 of them grows with 400.
SIZES = [pytest.param((1, 20, 60), id="60"), pytest.param((1, 40, 400), id="400", marks=pytest.mark.slow)]
MOST = 7000  # characters of any verb: `hlat show` prints the recipe, a field a line
VERBS = {
    "check": ("check", "recipe.yaml"),
    "check of missing files": ("check", "missing.yaml"),
    "data prepare": ("data", "prepare", "recipe.yaml"),
    "data show": ("data", "show", "recipe.yaml", "--samples", "0"),
    "show": ("show", "run"),
    "runs": ("runs", "."),
    "compare": ("compare", "run", "other"),
    "evaluate": ("evaluate", "run"),
    "launch slurm": ("launch", "slurm", "recipe.yaml", "--nodes", "2", "--nproc", "1", "--dry-run"),
}


def words(text: str) -> str:
    """Text without what differs from run to run: numbers, times, spaces of tables, and progress."""
    lines = (line for line in text.splitlines() if not line.startswith(("prepare: ", "preparing data: ")))
    return re.sub(r"\s+", " ", re.sub(r"[0-9a-f]{16,}|\d[\d,.:]*", "0", "\n".join(lines)))


def recipe(folder: Path, count: int) -> dict[str, object]:
    """A recipe of weighted sources, each with a copy, an empty row, and a size of its own."""
    sources = []
    for number in range(count):
        path = folder / f"source-number-{number:03}.jsonl"
        texts = [f"{number} {'some words in a row ' * (4 + number % 7)}", "", "a copy that each source has " * 4]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sources.append({"path": str(path), "name": f"source-number-{number:03}", "weight": 1 + number % 3})
    return {
        "run": {"dir": str(folder / "run"), "name": "bounds", "device": "cpu"},
        "model": {"vocab_size": 64, "layers": 1, "hidden_size": 16, "intermediate_size": 32, "heads": 2},
        "data": {
            "sources": sources,
            "sequence_length": 16,
            "packing": "best-fit",
            "tokenizer": {"train": "char"},
            "workers": 1,
        },
        "batch": {"global_batch": 4, "micro_batch": 2},
        "training": {"steps": 2, "log_every": 1},
        "evaluation": {"every_steps": 1, "sequences": 4},
    }


@pytest.fixture(scope="module", params=SIZES)
def outputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """Output of each verb, by the number of sources."""
    found: dict[str, dict[int, str]] = {}
    for count in request.param:
        folder = tmp_path_factory.mktemp(f"n{count:03}")
        content = recipe(folder, count)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
        missing = json.loads(json.dumps(content))
        for source in missing["data"]["sources"]:
            source["path"] += ".missing"
        missing["data"]["prepared_dir"] = str(folder / "nothing")
        (folder / "missing.yaml").write_text(yaml.safe_dump(missing))
        done = hlat("train", folder / "recipe.yaml", cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        found.setdefault("train", {})[count] = done.stdout + done.stderr
        # Another run, in whose recipe every source has another weight.
        shutil.copytree(folder / "run", folder / "other")
        events = folder / "other/events.jsonl"
        events.write_text(re.sub(r'"weight": (\d)', r'"weight": 1\1', events.read_text()))
        commands = [(command, folder) for command in VERBS.values()]
        for name, result in zip(VERBS, hlat_in_turn(commands), strict=True):
            text = (result.stdout + result.stderr).replace(str(folder), "FOLDER")
            assert (result.returncode == 0) == (name != "check of missing files"), text
            found.setdefault(name, {})[count] = text
        page = write_report([folder / "run", folder / "other"]).read_text()
        found.setdefault("report", {})[count] = re.sub(r"<(style|script)\b.*?</\1>", "", page, flags=re.DOTALL)
    return found


@pytest.mark.parametrize("verb", ["train", *VERBS, "report"])
def test_no_output_grows_with_the_sources(outputs: dict[str, dict[int, str]], verb: str) -> None:
    one, some, many = outputs[verb].values()
    if verb != "report":
        assert max(map(len, (one, some, many))) <= MOST, many
    assert len(words(many)) <= 1.05 * len(words(some)) + 40, many
    few, most = (len(set(re.findall(r"source-number-\d+", text))) for text in (some, many))
    assert most <= few + 2 <= 32, many


@pytest.mark.parametrize("name", ["lama-7b", "x", "meta-llama/Llama-9-9B" * 40])
def test_an_unknown_preset_names_the_three_nearest_and_how_to_list_all(name: str, tmp_path: Path) -> None:
    commands = [
        ("check", "quickstart", "data.path=x", f"model.preset={name}", "--no-files"),
        ("plan", "--model", name, "--cluster", "p5.48xlarge:1"),
    ]
    for done in hlat_in_turn([(each, tmp_path) for each in commands]):
        assert done.returncode == 2 and len(done.stderr) < 900
        assert sum(preset in done.stderr for preset in PRESETS) <= 6  # a name that contains another
        assert "hlat recipe presets lists all" in done.stderr


def test_mistakes_of_one_kind_are_three_and_a_count(tmp_path: Path) -> None:
    sources = [{"path": "x", "weight": -number} for number in range(1, 301)]
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump({"data": {"sources": sources}, "training": {"stepz": 3}}))
    ((done),) = hlat_in_turn([(("check", "wrong.yaml", "--no-files"), tmp_path)])
    assert "data.sources.2.weight" in done.stderr and "data.sources.3.weight" not in done.stderr
    assert "and 297 more of data.sources.N.weight" in done.stderr and "stepz" in done.stderr
    assert len(done.stderr) < 2500


@pytest.mark.parametrize("same", [True, False])
def test_the_report_of_many_ranks_is_as_long_as_that_of_few(same: bool) -> None:
    check = next(check for check in CHECKS if check.stage == "meeting")

    def lines(hosts: int) -> list[str]:
        gathered = Gathered({node: f"host-{node:02}" for node in range(hosts)}, 8)
        for rank in range(8 * hosts):
            gathered.add_trouble(check.name, rank // 8, rank, f"its process died{'' if same else f' after {rank} s'}")
        return list(judge(gathered, 8 * hosts, 1.0).lines())

    assert len(lines(8)) == len(lines(64)) <= 6
    assert sum(map(len, lines(64))) <= sum(map(len, lines(8))) + 40 < 1500


def test_the_first_items_are_named_and_the_others_counted_unless_all_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert listed([]) == "" and listed("ab") == "a, b" and listed("abc") == "a, b, c"
    assert listed("abcd") == "a, b, c, d", "a name is as short as its count"
    assert listed("abcdefg") == "a, b, c and 4 more"
    assert listed("abcdefg", between="; ") == "a; b; c; and 4 more"
    assert first_of(range(1040), 8) == (list(range(8)), "and 1,032 more")
    monkeypatch.setenv("HLAT_VERBOSE", "1")
    assert listed("abcdefg") == "a, b, c, d, e, f, g"
