"""The generated reference has every field, verb, event, exit code and public name, with what a reader needs of each."""

import re
import typing
from collections.abc import Iterator
from functools import cache

import jsonschema
import pytest
from pydantic import BaseModel

import hlat
from hlat.config import HF_NAMES, Recipe, recipe_schema
from hlat.runtime.errors import HlatError
from hlat.runtime.process import STOP_EXIT_CODES
from hlat.tracking.console import _LEVELS
from tests.cli.test_surface import SURFACE
from tests.support.pages import ROOT
from website.reference import PAGES
from website.reference.recipe import EXAMPLES, example, fields, is_section

SCHEMA = recipe_schema()


@cache
def page(name: str) -> str:
    return PAGES[f"reference/{name}.md"]()


def models_fields(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Paths of the fields of a section by its class, not by the schema that the page is made of."""
    for name, field in model.model_fields.items():
        here = f"{path}.{name}" if path else name
        yield here
        for section, is_list in sections_of(field.annotation):
            yield from models_fields(section, here + ("[]" if is_list else ""))


def sections_of(annotation: typing.Any, is_list: bool = False) -> Iterator[tuple[type[BaseModel], bool]]:
    """Sections that an annotation names; within a tuple they are entries of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, is_list
    for inner in typing.get_args(annotation):
        yield from sections_of(inner, is_list or typing.get_origin(annotation) in (tuple, list))


def test_every_field_of_the_recipes_classes_is_on_the_page() -> None:
    headings = set(re.findall(r"^#+ `([^`]+)`", page("recipe"), re.MULTILINE))
    wanted = set(models_fields(Recipe))
    assert len(wanted) > 150
    assert wanted - headings == set()
    assert "include" in headings  # a field of files only, which the resolved recipe has not


def test_every_field_has_a_meaning_a_default_and_an_example_that_the_schema_accepts() -> None:
    for field in fields(SCHEMA):
        name = f"{field.path}, kind {field.kind}"
        heading = re.escape(f"`{field.path}`") + (f" [^\n]*kind: {field.kind}\\)" if field.kind else "")
        entry = re.search(rf"^#+ {heading} [^\n]*\n(.*?)(?=^#+ |\Z)", page("recipe"), re.DOTALL | re.MULTILINE)
        assert entry is not None, name
        if is_section(field, SCHEMA):
            continue
        assert "default" in entry[1] and "example: `" in entry[1], name
        if field.path.rpartition(".")[2] != "kind":
            assert field.node.get("description"), f"{name}: a sentence under the field in config/sections"
        jsonschema.Draft202012Validator({**field.node, "$defs": SCHEMA["$defs"]}).validate(example(field, SCHEMA))


def test_names_of_hugging_face_are_beside_the_fields_and_in_the_schema() -> None:
    for theirs, own in HF_NAMES.items():
        entry = re.search(rf"^### `model\.{re.escape(own)}` .*?(?=^###? |\Z)", page("recipe"), re.DOTALL | re.MULTILINE)
        assert entry is not None and f"Hugging Face's name, accepted too: `{theirs}`" in entry[0]
        jsonschema.Draft202012Validator(SCHEMA).validate({"model": {theirs: 1}})


def test_examples_are_of_fields() -> None:
    assert set(EXAMPLES) <= {field.path for field in fields(SCHEMA)}


@pytest.mark.parametrize("verb", sorted(SURFACE))
def test_a_verb_is_on_the_page_with_every_argument_and_option(verb: str) -> None:
    entry = re.search(rf"^## `hlat {verb}` .*?(?=^## |\Z)", page("commands"), re.DOTALL | re.MULTILINE)
    assert entry is not None
    shown = set(re.findall(r"^\| `([^`]+)` \|", entry[0], re.MULTILINE))
    names = {part for name in shown for part in name.split(", ")}
    wanted = {name if name.startswith("-") else name.upper() for name in SURFACE[verb]}
    assert wanted <= {part for name in names for part in name.split(" / ")}


def test_every_event_is_on_the_page() -> None:
    """Found by the text of the source, not by its syntax tree as the page is; and those that have a level."""
    rows = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", page("events"), re.MULTILINE))
    call = re.compile(r"\b(?:tracker\.event|_report|TrackerNote|TierEvent|events\.append)\(\s*(?:#.*\s*)?\"(\w+)\"")
    source = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "src/hlat").rglob("*.py"))
    wanted = {*call.findall(source), *_LEVELS, "start", "resume", "end"}
    assert wanted - rows.keys() == {"open"}, "a note between processes"
    assert {kind: rows[kind] for kind in _LEVELS} == _LEVELS


def test_every_exit_code_is_on_the_page_and_in_the_runbook() -> None:
    def errors(of: type[HlatError]) -> Iterator[type[HlatError]]:
        yield of
        for one in of.__subclasses__():
            if one.__module__.startswith("hlat."):
                yield from errors(one)

    generated = page("exit-codes")
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", generated, re.MULTILINE)}
    assert listed == {0, 1, *STOP_EXIT_CODES, *(error.exit_code for error in errors(HlatError))}
    assert all(f"`{error.__name__}`" in generated for error in errors(HlatError))
    runbook = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
    table = runbook.split("| exit code |", 1)[1].split("\n\n", 1)[0]
    assert {
        int(code) for cell in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for code in cell.split(",")
    } == listed


def test_every_public_name_of_python_is_on_the_page() -> None:
    assert set(re.findall(r"^(?:### |\| )`(\w+)`", page("python"), re.MULTILINE)) >= set(hlat._HOMES)


def test_metrics_have_their_units() -> None:
    keys = {
        key
        for row in re.findall(r"^\| (`[^|]+) \|", page("metrics"), re.MULTILINE)
        for key in re.findall(r"`(\w+)`", row)
    }
    assert {"loss", "lr", "tokens_per_second", "mfu", "memory_bytes", "hlat_loss", "hlat_heartbeat_age_seconds"} <= keys
    assert "nats per token" in page("metrics")


def test_names_in_angle_brackets_are_shown() -> None:
    """Markdown would take them for tags, and Python-Markdown has no escape for them."""
    for name in ("recipe", "commands"):
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", page(name), flags=re.DOTALL)
        assert not re.search(r"<\w|\\<", prose), name
    assert "runs/&lt;name>" in page("recipe")
