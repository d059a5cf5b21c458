"""Records of benchmarks, the table made of them, links between pages, and numbers quoted in README.md."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jsonschema
import pytest
from pydantic import ValidationError

from hlat.config import load_recipe
from hlat.model.counts import count_parameters

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
NO_MEASUREMENT = {
    "results.py",
    "mutant_places.py",
    "mutant_trials.py",
    "stock_training.py",
    "torchtitan_training.py",
}  # modules that scripts import
SCRIPTS = sorted(file for file in BENCHMARKS.glob("*.py") if file.name not in NO_MEASUREMENT)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *BENCHMARKS.rglob("*.md")])


@pytest.fixture(scope="module")
def results() -> ModuleType:
    """benchmarks/results.py as a module."""
    spec = importlib.util.spec_from_file_location("benchmark_results", BENCHMARKS / "results.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_record_passes_the_schema(results: ModuleType) -> None:
    records = results.load_records()
    assert records
    schema = json.loads(results.SCHEMA.read_text(encoding="utf-8"))
    for file in results.RECORDS.iterdir():
        assert file.suffix == ".json", "raw data belongs into benchmarks/raw"
        jsonschema.validate(json.loads(file.read_text(encoding="utf-8")), schema)


def test_the_table_and_the_schema_are_up_to_date(results: ModuleType) -> None:
    command = "run python benchmarks/results.py --write"
    assert results.TABLE.read_text(encoding="utf-8") == results.table(results.load_records()), command
    assert results.SCHEMA.read_text(encoding="utf-8") == results.schema(), command


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_every_benchmark_writes_a_record(script: Path) -> None:
    """It imports Recorder, creates one for its own file with a page of the notebook, adds claims, and writes it."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    created = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Recorder"]
    methods = {(ast.unparse(call.func.value), call.func.attr) for call in calls if isinstance(call.func, ast.Attribute)}
    assert "Recorder" in imported
    assert created
    for call in created:
        file, page = call.args
        assert ast.unparse(file) == "__file__"
        assert isinstance(page, ast.Constant) and (ROOT / "docs/notebook" / str(page.value)).is_file()
    assert {("record", "add"), ("record", "write")} <= methods


def test_a_recorder_writes_medians_spreads_and_the_machine(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HLAT_BENCHMARK_RESULTS", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["x.py", "/of/mine/books.parquet", "--folder=/tmp/of/mine", "a=b/c"])
    record = results.Recorder(str(BENCHMARKS / "integrity.py"), "recovery.md", packages=("no-such-package",))
    record.add("speed of something", "GB/s", [3.0, 1.0, 2.0], peer="a copy", peer_values=4.0, note="goal 1")
    file = record.write()
    assert file == tmp_path / "integrity.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    (claim,) = found["claims"]
    assert claim["ours"] == {"value": 2.0, "low": 1.0, "high": 3.0, "rounds": 3}
    assert claim["peer"] == {"name": "a copy", "value": 4.0, "low": None, "high": None, "rounds": None}
    assert found["command"] == "python benchmarks/integrity.py books.parquet --folder=mine a=b/c"
    assert found["versions"]["torch"] and found["versions"]["no-such-package"] is None
    assert found["source"] == "measured by the script"
    assert found["machine"]["cores"] >= 1
    if Path("/proc/stat").exists():
        assert found["machine"]["load"] in ("quiet", "busy")
    assert [path.name for path in tmp_path.iterdir()] == ["integrity.json"]


@pytest.mark.parametrize("values", [[], [float("nan")], float("inf")], ids=["none", "not a number", "infinite"])
def test_a_recorder_refuses_what_is_no_number(results: ModuleType, values: float | list[float]) -> None:
    record = results.Recorder(str(BENCHMARKS / "integrity.py"), "recovery.md")
    with pytest.raises(ValueError):
        record.add("speed of something", "GB/s", values)


def test_a_record_without_claims_is_not_written(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HLAT_BENCHMARK_RESULTS", str(tmp_path))
    with pytest.raises(ValidationError):
        results.Recorder(str(BENCHMARKS / "integrity.py"), "recovery.md").write()
    assert not list(tmp_path.iterdir())


def test_the_table_shows_measured_claims_and_names_transcribed_records(results: ModuleType) -> None:
    machine = {"cpu": None, "cores": None, "bf16": None, "load": None}
    claim = {"claim": "speed of something", "unit": "s", "ours": {"value": 1.5}}
    content = {
        "script": "benchmarks/integrity.py", "command": None, "source": "measured by the script",
        "page": "recovery.md", "date": "2026-11-22", "commit": None, "versions": {}, "machine": machine,
        "claims": [claim] * 5,
    }  # fmt: skip
    copied = content | {"source": "transcribed from the notebook"}
    made = {"new": results.Record.model_validate(content), "old": results.Record.model_validate(copied)}
    table = results.table(made)
    (row,) = [line for line in table.splitlines() if "speed of something" in line]
    assert row.count("1.5 s") == 3 and "2 more" in row and "unknown, 2026-11-22" in row
    assert "[new](../../benchmarks/results/new.json), [integrity.py](../../benchmarks/integrity.py)" in row
    assert table.splitlines()[-1] == "| [recovery.md](recovery.md) | [old](../../benchmarks/results/old.json) |"


def test_relative_links_lead_to_files_and_headings() -> None:
    wrong = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", _without_code(page)):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, heading = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists():
                wrong.append(f"{page.relative_to(ROOT)}: {target}: no such file")
            elif heading and heading not in _headings(file):
                wrong.append(f"{page.relative_to(ROOT)}: {target}: no such heading")
    assert not wrong


def test_every_page_of_the_notebook_is_in_its_index() -> None:
    index = (ROOT / "docs/notebook/README.md").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs/notebook").glob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"^\| \[[^]]*\]\(([^)]+)\)", index, re.MULTILINE))


def test_files_named_in_pages_exist() -> None:
    """Files are named from the root of the repository, or, if they end in .py, from src/hlat."""
    wrong = []
    for page in PAGES:
        text = _text(page)
        named = set(re.findall(r"\b(?:benchmarks|tests|docs|recipes|src/hlat)/[\w./-]*\w", text))
        sources = set(re.findall(r"`((?:\w+/)+\w+\.(?:py|yaml))`", text))
        wrong += [
            f"{page.relative_to(ROOT)}: {path}"
            for path in sorted(named | sources)
            if not any((folder / path).exists() for folder in (ROOT, ROOT / "src/hlat"))
        ]
    assert not wrong


def test_the_glossary_is_alphabetical() -> None:
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    terms = [term.lower() for term in re.findall(r"^- \*\*(.+?)\*\*", text, re.MULTILINE)]
    assert terms == sorted(terms) and len(terms) == len(set(terms)) and terms


# claims of README.md that are quantities -> (record, claim) where the number stands
README_CLAIMS = {
    "about two minutes": ("quickstart-2026-11-21", "hlat quickstart: training, evaluation, sample and export", 146.0),
}


def test_every_quantity_in_readme_has_a_record(results: ModuleType) -> None:
    """Times and speeds outside of commands; sizes of models are checked against the recipes below."""
    prose = _without_code(ROOT / "README.md")
    units = r"(?:times|%|tokens/s|[GM]B/s|[GM]iB|seconds?|minutes?|hours?|days?|faster|slower)"
    quoted = re.findall(rf"(?:about )?(?:\d[\d.,]*|one|two|three|four|five|ten|half) {units}", prose)
    assert set(quoted) == set(README_CLAIMS)
    for record, claim, value in README_CLAIMS.values():
        found = [one.ours.value for one in results.load_records()[record].claims if one.claim == claim]
        assert found == [value]


# results of docs/gallery.md -> (record, beginning of a claim, which of its numbers)
GALLERY_CLAIMS = {
    "1.6702": ("tiny_shakespeare-2026-11-21", "validation loss of tiny-shakespeare over", "low"),
    "1.6709": ("tiny_shakespeare-2026-11-21", "validation loss of tiny-shakespeare over", "high"),
    "138 s": ("tiny_shakespeare-2026-11-21", "time of tiny-shakespeare", "high"),
    "1.560": ("muon_shakespeare", "validation loss of tiny-shakespeare with Muon", "low"),
    "1.573": ("muon_shakespeare", "validation loss of tiny-shakespeare with Muon", "high"),
    "1.725": ("compression", "bits per byte of a novel", "value"),
}


def test_results_in_the_gallery_have_a_record(results: ModuleType) -> None:
    page, records = _text(ROOT / "docs/gallery.md"), results.load_records()
    for quoted, (record, beginning, part) in GALLERY_CLAIMS.items():
        number = quoted.removesuffix(" s")
        digits = len(number.partition(".")[2])
        claim = next(one for one in records[record].claims if one.claim.startswith(beginning))
        assert quoted in page
        assert f"{getattr(claim.ours, part):.{digits}f}" == number


@pytest.mark.parametrize("recipe", ["quickstart", "tiny-shakespeare", "books"])
def test_the_model_sizes_in_readme_are_those_of_the_recipes(recipe: str) -> None:
    row = next(line for line in _text(ROOT / "README.md").splitlines() if line.startswith(f"| `{recipe}`"))
    quoted = re.search(r"([\d.]+) M parameters", row)
    assert quoted is not None
    counted = count_parameters(load_recipe(recipe, ["data.path=none"]).model).total / 1e6
    digits = len(quoted[1].partition(".")[2])
    assert round(counted, digits) == float(quoted[1])


def test_files_that_mutants_are_tested_with_exist() -> None:
    command = [sys.executable, "-c", _NAMES_OF_TESTS]
    names = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=True).stdout.split()
    assert names
    assert not [name for name in names if not (ROOT / name).exists()]


_NAMES_OF_TESTS = """
from mutant_trials import NEAR, WIDE, test_files
for names in (*NEAR.values(), *WIDE.values()):
    print(*test_files(names))
"""


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _without_code(page: Path) -> str:
    """Text of a page without fenced blocks, indented blocks and code spans."""
    text = re.sub(r"^```.*?^```", "", _text(page), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    return re.sub(r"(?<!\[)`[^`\n]*`", "", text)


def _headings(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", _text(page), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in found]
    return {heading.strip().replace(" ", "-") for heading in plain}
