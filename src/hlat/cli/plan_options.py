"""Parsing and checking of the options of ``hlat plan``, before anything is computed."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


def parse_amount(text: str | None, option: str = "--tokens") -> int | None:
    """A large number, of tokens or FLOPs: 300000000000, 3e11, 300B.

    Raises:
        PlanError: not a number.
    """
    from hlat.runtime.errors import PlanError
    from hlat.runtime.quantities.parsing import QuantityError, parse_whole

    if text is None:
        return None
    try:
        found = parse_whole(text)
    except QuantityError as error:
        raise PlanError(f"{option} {text}: {error}") from None
    if found is None or found <= 0:
        raise PlanError(f"{option} {text}: must be a positive number, as in 300B, 3e11 or 300_000_000_000")
    return found


def check_question(
    model: str | None,
    cluster: Sequence[str] | None,
    chips: str | None,
    goals: Mapping[str, str | None],
    sizes: Mapping[str, str | None],
    of_clusters: Sequence[object],
    tokens: str | None,
) -> None:
    """Check that a plan is asked for on clusters, for a number of chips, or for the size of a model.

    Args:
        model: value of --model.
        cluster: values of --cluster.
        chips: value of --chips.
        goals: values of --deadline and --budget.
        sizes: values of options that only the size of a model takes.
        of_clusters: values of options that a choice of the number does not take.
        tokens: value of --tokens.

    Raises:
        PlanError: it is none of them, or several, or an option belongs to another.
    """
    from hlat.runtime.errors import PlanError

    problems: list[str] = []
    sized = any(value is not None for value in (goals["--budget"], *sizes.values()))
    if model is None and chips and sized:
        problems += _size_problems(goals["--budget"], sizes["--flops"], tokens)
    elif model is None or not (cluster or chips):
        problems.append(_lacking(model, bool(cluster or chips)))
    elif cluster and chips:
        problems.append("--cluster plans for a number of instances, --chips chooses it: give one of them")
    if chips and any(of_clusters):
        others = "--per, --rank-by, --layout, --against, --html, --trace and --fragment"
        problems.append(f"{others} go with --cluster: choose the number with --chips first, then plan on that cluster")
    if any(goals.values()) and not chips:
        problems.append("--deadline and --budget go with --chips, as in --chips any --deadline 14d")
    if model is not None and any(sizes.values()):
        problems.append("--flops and --inference-tokens choose the size of a model: leave --model out")
    if problems:
        raise PlanError("\n".join(problems))


def _lacking(model: str | None, has_place: bool) -> str:
    """Say which of the two main options lack, with an example."""
    if model is not None:
        return (
            "--cluster is missing: on what to train, as in --cluster p5.48xlarge:4. Or give --chips any with "
            "--deadline 14d or --budget 50k, and the number is chosen"
        )
    example = "--model is missing: a preset, config.json or recipe, as in --model llama-3.1-8b"
    if has_place:
        return f"{example}. With --chips, --budget 50k or --flops 1e22 chooses the size of the model instead"
    return f"{example}; and --cluster, as in --cluster p5.48xlarge:4, or --chips any to choose the cluster"


def _size_problems(budget: str | None, flops: str | None, tokens: str | None) -> Iterator[str]:
    """Yield what is wrong with a question for the size of a model."""
    if (budget is None) == (flops is None):
        yield "without --model, the size of a model follows from --budget or --flops: give one of them"
    if tokens is not None:
        yield "--tokens needs --model: without one, size and tokens are chosen together"


def check_outputs(paths: Sequence[Path | None]) -> None:
    """Raises: StorageError: a file could not be written where it is asked for."""
    from hlat.runtime.errors import StorageError

    problems = list(_unwritable(path for path in paths if path is not None))
    if problems:
        raise StorageError("\n".join(problems))


def _unwritable(paths: Iterator[Path]) -> Iterator[str]:
    for path in paths:
        if path.is_dir():
            yield f"{path} is a folder; name a file"
        elif not path.absolute().parent.is_dir():
            yield f"{path} cannot be written: there is no folder {path.absolute().parent}"
