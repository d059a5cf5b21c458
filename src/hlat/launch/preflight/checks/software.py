"""Equality of software, code and recipe across hosts: processes that differ deadlock, or train something else."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hlat.launch.preflight.checks.base import Evidence, Facts, HealthCheck, Symptom
from hlat.launch.preflight.place import HostView

_MAX_SHOWN = 5  # differing fields of a recipe in a message


def _differences(
    evidence: Evidence, values: Callable[[Facts], Mapping[str, Any]]
) -> Iterator[tuple[int, str, Any, Any]]:
    """Compare values across places: (host, item, its value, value of most places); of a tie, that of the first."""
    by_case = [(case.node, values(case.facts)) for case in evidence.cases]
    for item in dict.fromkeys(item for _, found in by_case for item in found):
        counts = Counter(repr(found.get(item)) for _, found in by_case)
        usual = max(counts, key=lambda text: counts[text])  # the first of equal counts
        expected = next(found.get(item) for _, found in by_case if repr(found.get(item)) == usual)
        odd = {node: found.get(item) for node, found in by_case if repr(found.get(item)) != usual}
        yield from ((node, item, value, expected) for node, value in odd.items())


def _versions(facts: Facts) -> Mapping[str, Any]:
    versions: Mapping[str, Any] = facts["versions"]
    return versions


def _judge_versions(evidence: Evidence) -> Iterator[Symptom]:
    for node, item, value, expected in _differences(evidence, _versions):
        yield Symptom(node, f"{item} is {value or 'missing'}, and {expected or 'missing'} on the other hosts")


def _summary_of_versions(evidence: Evidence) -> str:
    found = evidence.cases[0].facts["versions"] if evidence.cases else {}
    return ", ".join(f"{name} {found[name]}" for name in ("torch", "driver") if found.get(name))


def _judge_code(evidence: Evidence) -> Iterator[Symptom]:
    for node, _, value, expected in _differences(evidence, lambda facts: {"source": facts["source"]}):
        yield Symptom(node, f"hlat's source files differ: hash {value}, and {expected} on the other hosts")


def _measure_recipe(place: HostView) -> Facts:
    recipe, error = place.request.recipe, place.request.recipe_error
    fields = {} if recipe is None else _flat(recipe.model_dump(mode="json"))
    return {"fields": fields, "wrong": error, "given": recipe is not None or bool(error)}


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Fields of nested sections by their path, such as ``training.steps``."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        found.update(_flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value})
    return found


def _judge_recipe(evidence: Evidence) -> Iterator[Symptom]:
    wrong = {case.node for case in evidence.cases if case.facts["wrong"]}
    yield from (Symptom(case.node, f"{case.facts['wrong']}") for case in evidence.cases if case.node in wrong)
    differing: dict[int, list[str]] = {}
    given = Evidence(tuple(case for case in evidence.cases if case.node not in wrong), evidence.hosts)
    for node, item, value, expected in _differences(given, lambda facts: facts["fields"]):
        differing.setdefault(node, []).append(f"{item} is {value}, and {expected} on the other hosts")
    for node, lines in differing.items():
        more = f"; and {len(lines) - _MAX_SHOWN} more" if len(lines) > _MAX_SHOWN else ""
        yield Symptom(node, "; ".join(lines[:_MAX_SHOWN]) + more)


CHECKS = (
    HealthCheck(
        "HD04",
        "software-equal",
        "rank",
        "Install the same versions on all hosts (one image, one environment on a shared disk), and the same driver.",
        module="software",
        judge=_judge_versions,
        summary=_summary_of_versions,
    ),
    HealthCheck(
        "HD05",
        "code-equal",
        "rank",
        "Use the same installation of hlat on all hosts; PYTHONPATH may name another one there.",
        module="software",
        judge=_judge_code,
        after=("software-equal",),
    ),
    HealthCheck(
        "HD06",
        "recipe-equal",
        "host",
        "Give every host the same recipe file and overrides, from a disk that all share.",
        measure=_measure_recipe,
        judge=_judge_recipe,
    ),
)
