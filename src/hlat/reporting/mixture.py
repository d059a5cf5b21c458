"""The data mixture of a run: shares that the recipe asks for, and tokens delivered so far.

data section, samples consumed -> Mixture.counts -> tokens of each source (delivered)
prepared data without weights  -> manifest       -> tokens of each source in an epoch
"""

from collections.abc import Sequence

from hlat.config import Recipe
from hlat.data import Mixture, is_weighted, phase_weights, read_data_manifest
from hlat.page import Html, bar_chart, grid, paragraph, section, table
from hlat.reporting.run_record import RunRecord
from hlat.runtime.errors import DataError


def mixture_section(run: RunRecord) -> Html:
    """Show sources with the share asked for and the tokens delivered."""
    return section("Data mixture", _contents(run), level=3)


def _contents(run: RunRecord) -> list[Html]:
    if run.recipe is None:
        return [paragraph("The recipe is unknown, and with it the data.")]
    samples = int(run.last("samples") or 0)
    if is_weighted(run.recipe.data):
        try:
            return _weighted(run.recipe, samples)
        except (DataError, ValueError) as error:
            return [paragraph(f"The mixture cannot be computed: {error}")]
    return _by_size(run, run.recipe, samples)


def _weighted(recipe: Recipe, samples: int) -> list[Html]:
    """Compare what was asked until now with what was delivered; the order of samples is a formula."""
    phases = phase_weights(recipe.data)
    delivered = Mixture(phases).counts(samples)
    asked, start = [0.0] * len(recipe.data.sources), 0
    for phase in phases:
        stop = samples if phase.stop is None else min(samples, phase.stop)
        share = max(0, stop - start) / (phase.period or 1)
        asked = [before + weight * share for before, weight in zip(asked, phase.weights, strict=True)]
        start = max(start, stop)
    length, total = recipe.data.sequence_length, samples or 1
    names = _names(recipe)
    rows = [
        (name, f"{wanted / total:.3%}", f"{count / total:.3%}", f"{int(count) * length:,}")
        for name, wanted, count in zip(names, asked, delivered, strict=True)
    ]
    tokens = {name: float(count) * length for name, count in zip(names, delivered, strict=True)}
    columns = ("source", "asked until now", "delivered", "tokens delivered")
    return [_bar("Tokens delivered", tokens), table(columns, rows, caption="Data mixture, asked and delivered")]


def _by_size(run: RunRecord, recipe: Recipe, samples: int) -> list[Html]:
    """Show the sources of one corpus: each supplies its share of the tokens in every epoch."""
    tokens = samples * recipe.data.sequence_length
    try:
        manifest = read_data_manifest(recipe.prepared_dir if recipe.prepared_dir.is_dir() else run.folder / "data")
    except (DataError, OSError):
        manifest = None
    if manifest is None or recipe.data.mode == "online":
        return [paragraph(f"The sources have no weights: they are one corpus, of which {tokens:,} tokens were read.")]
    names = manifest.source_names
    sizes = _largest([(names[each.source], each.tokens) for each in manifest.splits["train"].sources])
    every = sum(size for _, size in sizes) or 1
    note = (
        f"The sources have no weights: they are one corpus, mixed by size. The run has read {tokens:,} tokens, "
        f"{tokens / every:.3g} epochs of it."
    )
    rows = [(name, f"{size / every:.2%}", f"{size:,.0f}", f"{tokens * size / every:,.0f}") for name, size in sizes]
    columns = ("source", "share", "tokens of an epoch", "tokens read, about")
    return [paragraph(note), _bar("Tokens of an epoch", dict(sizes)), table(columns, rows, caption="Data mixture")]


def _names(recipe: Recipe) -> list[str]:
    """Return labels of the sources; equal ones are numbered."""
    labels = [source.label for source in recipe.data.sources]
    return [label if labels.count(label) == 1 else f"{label} ({index})" for index, label in enumerate(labels)]


def _largest(sizes: Sequence[tuple[str, int]], most: int = 24) -> list[tuple[str, float]]:
    """Return the largest sources, and the rest as one."""
    ordered = sorted(((name, float(size)) for name, size in sizes), key=lambda pair: -pair[1])
    rest = ordered[most:]
    return ordered[:most] + ([(f"{len(rest):,} others", sum(size for _, size in rest))] if rest else [])


def _bar(title: str, tokens: dict[str, float]) -> Html:
    return grid([bar_chart(title, tokens, lambda size: f"{size:,.0f} tokens", unit="million tokens", scale=1e6)])
