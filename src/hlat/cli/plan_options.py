"""Parsing and checking of the options of ``hlat plan``, before anything is computed."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

if TYPE_CHECKING:
    from hlat.hardware import Cluster, PriceKind
    from hlat.planner.report import RankBy

_NUMBER = re.compile(r"(\d[\d_,]*(?:\.\d*)?(?:e\d+)?)([KMBT]?)", re.IGNORECASE)
_TIMES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_tokens(text: str | None) -> int | None:
    """A number of tokens: 300000000000, 3e11, 300B.

    Raises:
        PlanError: not a number.
    """
    from hlat.runtime import PlanError

    if text is None:
        return None
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        raise PlanError(f"--tokens {text}: must be a positive number, as in 300B, 3e11 or 300_000_000_000")
    return int(float(found[1].replace("_", "").replace(",", "")) * _TIMES[found[2].upper()])


def parse_rank_by(text: str | None) -> "RankBy | None":
    """Raises: PlanError: clusters are not ordered by this."""
    from hlat.planner.report import RankBy
    from hlat.runtime import PlanError

    choices: tuple[RankBy, ...] = get_args(RankBy)
    for known in choices:
        if text == known:
            return known
    if text is None:
        return None
    raise PlanError(f"--rank-by {text}: clusters are ordered by time or by cost")


def price_of(text: str | None, clusters: Sequence["Cluster"]) -> "PriceKind | None":
    """The kind of price that clusters are compared in: what is asked for, or the first that all of them have.

    Raises:
        PlanError: there is no such kind.
    """
    from hlat.hardware import PriceKind
    from hlat.planner.report import common_price_kind
    from hlat.runtime import PlanError

    kinds: tuple[PriceKind, ...] = get_args(PriceKind)
    for known in kinds:
        if text == known:
            return known
    if text is not None:
        raise PlanError(f"--price {text}: a price is one of {', '.join(kinds)}")
    return common_price_kind(clusters) if len(clusters) > 1 else None


def check_outputs(paths: Sequence[Path | None]) -> None:
    """Raises: StorageError: a file could not be written where it is asked for."""
    from hlat.runtime import StorageError

    problems = list(_unwritable(path for path in paths if path is not None))
    if problems:
        raise StorageError("\n".join(problems))


def _unwritable(paths: Iterator[Path]) -> Iterator[str]:
    for path in paths:
        if path.is_dir():
            yield f"{path} is a folder; name a file"
        elif not path.absolute().parent.is_dir():
            yield f"{path} cannot be written: there is no folder {path.absolute().parent}"
