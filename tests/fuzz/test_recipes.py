"""Every field of a recipe with sixty odd values, through ``hlat check``: a message or a resolved recipe, no traceback.

The default suite tests a seeded sample; ``-m slow`` tests all combinations, in a file and as an override.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fuzz.commanding import broken_law, command
from tests.support.fuzz.odd_values import ODD_VALUES, fields

SAMPLE = 100
SEED = 15

BASE = """
model: {preset: tiny-1m}
data: {path: corpus.txt}
training: {steps: 20}
"""

RICH = """
model: {preset: tiny-1m, rope: {scaling: {kind: llama3}}}
data:
  sources: [{path: a.txt, name: a}, {path: b.txt, name: b}]
  phases: [{until_tokens: 10000, weights: {a: 1}}, {weights: {a: 1, b: 2}}]
training: {steps: 20}
checkpoint: {local: {dir: /dev/shm/x}}
faults: [{kind: slow, at_step: 1, seconds: 1}]
"""
"""Recipe with one element in every list and every optional section, so that their fields exist."""

Case = tuple[str, str, bool]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "base.yaml").write_text(BASE, encoding="utf-8")
    (tmp_path / "rich.yaml").write_text(RICH, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def all_cases() -> Iterator[Case]:
    """Yield (field, value, True if in a file else False for an override); list elements have overrides only."""
    for field in fields():
        for value in ODD_VALUES:
            yield field, value, False
            if ".0." not in field:
                yield field, value, True


def arguments_of(case: Case) -> list[str]:
    """Command-line arguments of a case; a recipe file is written if the case needs one."""
    field, value, in_file = case
    base = "rich.yaml" if ".0." in field or field.startswith(("model.rope.", "checkpoint.local.")) else "base.yaml"
    if not in_file:
        return ["check", "--json", base, f"{field}={value}"]
    *sections, name = field.split(".")
    lines = [f"include: {base}", *(f"{'  ' * depth}{section}:" for depth, section in enumerate(sections))]
    recipe = "\n".join([*lines, f"{'  ' * len(sections)}{name}: {value}", ""])
    Path("recipe.yaml").write_text(recipe, encoding="utf-8")
    return ["check", "recipe.yaml"]


def assert_law(cases: list[Case]) -> None:
    broken = []
    for case in cases:
        if (violation := broken_law(command(arguments_of(case)))) is not None:
            broken.append(f"{case[0]} = {case[1][:80]!r} ({'file' if case[2] else 'override'}): {violation}")
    assert not broken, f"{len(broken)} of {len(cases)}:\n" + "\n".join(broken[:50])


def test_there_are_sixty_values_and_all_fields() -> None:
    assert len(set(ODD_VALUES)) == 60
    found = fields()
    assert len(set(found)) == len(found)
    assert {"data.sources.0.path", "faults.0.kind", "checkpoint.local.dir", "model.rope.scaling.factor"} <= set(found)


def test_a_sample_of_fields_and_odd_values(folder: Path) -> None:
    assert_law(random.Random(SEED).sample(list(all_cases()), SAMPLE))


@pytest.mark.slow
@pytest.mark.parametrize("section", sorted({field.split(".")[0] for field in fields()}))
def test_every_field_with_every_odd_value(folder: Path, section: str) -> None:
    assert_law([case for case in all_cases() if case[0].split(".")[0] == section])
