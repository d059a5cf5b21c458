"""The weights of a data section: the mixture of its sources, and the limits on repeating a source."""

from collections.abc import Sequence

from hlat.config import DataConfig, whole_weights
from hlat.data.samples.mixture import Mixture, PhaseWeights
from hlat.runtime.errors import DataError


def is_weighted(config: DataConfig) -> bool:
    """Return True if sources are mixed by weights instead of forming one corpus."""
    return bool(config.phases) or any(source.weight is not None for source in config.sources)


def build_mixture(config: DataConfig) -> Mixture | None:
    """Return the mixture that maps samples to sources; None if the sources have no weights.

    Raises:
        DataError: a phase has no sample of its own.
    """
    return Mixture(phase_weights(config)) if is_weighted(config) else None


def phase_weights(config: DataConfig) -> list[PhaseWeights]:
    """Return the weights of a weighted data section, phase by phase.

    Raises:
        DataError: a phase has no sample of its own.
    """
    if not config.phases:
        return [PhaseWeights(whole_weights([source.weight or 0.0 for source in config.sources]))]
    phases, before = [], 0
    for index, phase in enumerate(config.phases):
        last = index == len(config.phases) - 1
        stop = None if phase.until_tokens is None or last else int(phase.until_tokens // config.sequence_length)
        if stop is not None and stop <= before:
            raise DataError(
                f"data.phases.{index}.until_tokens = {phase.until_tokens:,.0f}: the phase begins at sample {before} "
                f"and has none of its own: a sample takes data.sequence_length = {config.sequence_length} tokens."
            )
        weights = [phase.weights.get(source.label, 0.0) for source in config.sources]
        phases.append(PhaseWeights(whole_weights(weights), stop))
        before = stop or 0
    return phases


def is_ever_sampled(config: DataConfig, source: int) -> bool:
    """Return True if any sample can come from a source, given by index."""
    if not is_weighted(config):
        return False
    if not config.phases:
        return bool(config.sources[source].weight)
    return any(phase.weights.get(config.sources[source].label) for phase in config.phases)


def refuse_too_many_epochs(config: DataConfig, needed: Sequence[int], rows: Sequence[int]) -> None:
    """Raise DataError if a run would repeat sources more often than ``max_epochs`` allows.

    Args:
        config: the data section.
        needed: samples of each source that the run takes.
        rows: samples in one pass over each source.
    """
    problems = []
    for source, need, available in zip(config.sources, needed, rows, strict=True):
        limit = None if source.max_epochs is None else int(source.max_epochs * available)
        if limit is not None and need > limit:
            length = config.sequence_length
            problems.append(
                f"source {source.label}: the run takes {need * length:,} tokens of it, {need / max(available, 1):.2f} "
                "passes; "
                f"max_epochs = {source.max_epochs:g} of its {available * length:,} tokens are {limit * length:,}: "
                f"{(need - limit) * length:,} too few. Give it more text or a smaller weight, raise max_epochs, or "
                "train for fewer tokens."
            )
    if problems:
        raise DataError("\n".join(problems))
