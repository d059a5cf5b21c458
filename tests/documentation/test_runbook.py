"""docs/runbook.md quotes messages, events, checks, fields and commands as hlat has them."""

import re

import pytest

from hlat.launch.preflight.judgement import CHECKS
from tests.support.pages import ROOT, command_lines, is_message, is_recipe_field, parse, spans, without_blocks
from website.reference.run_files import events

PAGE = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
PARAGRAPHS = [part.strip() for part in re.split(r"\n\s*\n", without_blocks(PAGE)) if part.strip()]
ENTRIES = [place for place, part in enumerate(PARAGRAPHS) if part.startswith("**")]
SECTIONS = {"run", "model", "data", "batch", "parallel", "memory", "optimizer", "schedule", "training", "checkpoint"}
SECTIONS |= {"recovery", "anomalies", "integrity", "evaluation", "precision", "tracking", "faults"}


def quoted_messages() -> list[str]:
    """Messages in the bold lines, in the tables of reasons, and wherever a part of a message is left out."""
    heads = [span for place in ENTRIES for span in spans(PARAGRAPHS[place].rpartition("**")[0])]
    tables = [part for part in PARAGRAPHS if part.startswith("| reason |")]
    reasons = [span for part in tables for row in part.splitlines()[2:] for span in spans(row.split(" | ")[0])]
    return sorted({*heads, *reasons, *(span for span in spans(without_blocks(PAGE)) if "..." in span)})


def test_there_are_enough_entries_each_with_cause_and_cure() -> None:
    assert len(ENTRIES) >= 25
    for place, after in zip(ENTRIES, [*ENTRIES[1:], len(PARAGRAPHS)], strict=True):
        text = " ".join(PARAGRAPHS[place + 1 : after])
        assert text.startswith("Cause") and re.search(r"[Cc]ure\b", text), PARAGRAPHS[place]


@pytest.mark.parametrize("message", quoted_messages())
def test_a_quoted_message_is_one_of_the_program(message: str) -> None:
    assert is_message(message)


def test_a_message_that_nobody_prints_is_noticed() -> None:
    assert not is_message("waiting for hosts: ... of ... hosts are steady")


def test_every_command_is_read_by_the_parser_of_the_command_line() -> None:
    lines = command_lines(PAGE)
    assert len(lines) > 25
    for words in lines:
        _, arguments = parse(words)
        for override in arguments.get("overrides") or ():
            assert is_recipe_field(override.partition("=")[0]), words


def test_every_field_named_is_one_of_recipes() -> None:
    named = [span.partition("=")[0] for span in spans(without_blocks(PAGE))]
    fields = {name for name in named if re.fullmatch(r"[a-z]+(\.[a-z_]+)+", name) and name.split(".")[0] in SECTIONS}
    assert fields
    assert not {name for name in fields if not is_recipe_field(name)}


def test_every_event_and_check_named_exists() -> None:
    pairs = re.findall(r"\bevents? `(\w+)`(?:(?: or|,| and) `(\w+)`)?", without_blocks(PAGE))
    named = {name for pair in pairs for name in pair if name}
    assert len(named) > 10 and named <= events().keys()
    assert set(re.findall(r"\bHD\d\d\b", PAGE)) <= {check.id for check in CHECKS}
