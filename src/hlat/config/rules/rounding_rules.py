"""Rules of stochastic rounding in hardware: where it is right, and where copies of a weight would drift apart."""

from collections.abc import Iterator

from hlat.config.errors import Problem
from hlat.config.rules import layout_checks as checks
from hlat.config.rules.rule_context import Rule, Values


def _rounding(v: Values) -> Iterator[Problem]:
    """Check that hardware may round: one mode, no promise of equal bits, and no element on two ranks.

    Devices round with random numbers of their own. Two ranks that store the same element and update it separately
    would store different values after the first step, and more so after every further one.
    """
    if v("precision.rounding") != "hardware":
        return
    path, mode = "precision.rounding", v("precision.mode")
    if mode != "bf16-sr":
        yield Problem(
            path, f"precision.mode={mode} rounds nothing stochastically.", "Use precision.mode=bf16-sr.", v(path), True
        )
    if v("run.deterministic"):
        reason = "the state of a device's random numbers is in no checkpoint, so a resumed run has other bits."
        yield Problem(path, reason, "Accept that with run.deterministic=false, or use software.", v(path), True)
    for field, stored, remedy in _copies(v):
        reason = f"precision.rounding=hardware rounds copies apart: {stored}."
        yield Problem(field, reason, f"{remedy}, or precision.rounding=software.", v(field), True)


def _copies(v: Values) -> Iterator[tuple[str, str, str]]:
    """Yield fields that make several ranks store the same elements: field, what they store, remedy."""
    if v("parallel.tensor") > 1:
        yield "parallel.tensor", "every tensor-parallel rank stores the norm weights", "Use parallel.tensor=1"
    if v("parallel.replicas") > 1:
        yield "parallel.replicas", "every replica stores all weights", "Use parallel.replicas=1"
    ranks = v("parallel.context") * (checks.data_degree(v) if "world" in v else 1)
    if v("parallel.zero") == 0 and ranks > 1:
        yield "parallel.zero", "every data- and context-parallel rank stores all weights", "Use parallel.zero=1"
    if v("parallel.pipeline") > 1 and v("model.tie_embeddings"):
        stored = "first and last stage store the tied embedding"
        yield "parallel.pipeline", stored, "Use parallel.pipeline=1, model.tie_embeddings=false"


ROUNDING_RULES: tuple[Rule, ...] = (_rounding,)
