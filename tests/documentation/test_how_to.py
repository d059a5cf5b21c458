"""docs/how-to, docs/from: the parser reads the commands, fields and events exist, a page of a seam names its table."""

import re

import pytest

from tests.documentation.test_runbook import SECTIONS
from tests.support.pages import ROOT, command_lines, is_recipe_field, parse, spans, without_blocks
from website.reference.commands import verbs as all_verbs
from website.reference.run_files import events

TEXTS = {page.stem: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs/how-to").glob("*.md"))}
TEXTS |= {  # without the first column of their tables, which has the other program's names
    f"from-{page.stem}": re.sub(r"^\|[^|]*\|", "|", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for page in sorted((ROOT / "docs/from").glob("*.md"))
}
SEAMS = {
    # page -> the one place that lists the alternatives
    "optimizer": "src/hlat/optim/table.py",
    "architecture": "src/hlat/model/architectures/__init__.py",
    "format": "src/hlat/data/formats/registry.py",
    "tracker": "src/hlat/tracking/hosted.py",
    "backend": "src/hlat/runtime/backend/table.py",
    "chip": "src/hlat/hardware/catalog.yaml",
}


@pytest.mark.parametrize("page", sorted(TEXTS))
def test_commands_are_read_by_the_parser_and_fields_exist(page: str) -> None:
    for words in command_lines(TEXTS[page]):
        _, arguments = parse(words)
        for override in arguments.get("overrides") or ():
            assert is_recipe_field(override.partition("=")[0]), words
    named = [span.partition("=")[0].partition(":")[0] for span in spans(without_blocks(TEXTS[page]))]
    fields = {name for name in named if re.fullmatch(r"[a-z]+(\.[a-z_]+)+", name) and name.split(".")[0] in SECTIONS}
    assert not {name for name in fields if not is_recipe_field(name)}


def test_commands_within_sentences_are_verbs() -> None:
    found = [span for text in TEXTS.values() for span in spans(without_blocks(text)) if span.startswith("hlat ")]
    assert len(found) > 10
    verbs = {words for words, _ in all_verbs()}
    for span in found:
        words = [word for word in span.split()[1:] if not word.startswith("-")]
        assert any(" ".join(words[:count]) in verbs for count in (1, 2)) or not words, span


@pytest.mark.parametrize("page", sorted(SEAMS))
def test_a_page_leads_to_the_place_that_lists_the_alternatives(page: str) -> None:
    assert f"]({'../../' + SEAMS[page]})" in TEXTS[page] and (ROOT / SEAMS[page]).is_file()


def test_events_of_hangs_and_symptoms_exist() -> None:
    named = {name for page in ("hang", "symptoms") for name in re.findall(r"events? `(\w+)`", TEXTS[page])}
    assert named and named <= events().keys()


def test_every_symptom_has_a_cause_and_a_cure() -> None:
    rows = [row.strip("| ").split(" | ") for row in TEXTS["symptoms"].splitlines() if row.startswith("| ")][1:]
    assert len(rows) >= 15 and all(len(row) == 3 and all(row) for row in rows)
