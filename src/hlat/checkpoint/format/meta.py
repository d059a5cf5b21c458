"""``meta.json``: what a checkpoint says of itself, and which types its fields have.

    bytes --parse_meta--> a mapping whose known fields have the types below; others are left as they are

Every reader of a checkpoint comes by here, ``verify`` too: a file that was edited and sealed anew is damage that is
named, not a surprise in the middle of a verb.
"""

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hlat.runtime import CheckpointError

META_NAME = "meta.json"

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Ids = _Count | list[_Count] | None


_LISTED = 8


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _SpecialIds(_Strict):
    """As ``hlat.model.hf.SpecialIds``."""

    model_config = ConfigDict(extra="forbid")
    bos: _Ids = None
    eos: _Ids = None
    pad: _Ids = None


class _Rollback(_Strict):
    step: _Count
    samples: Annotated[list[_Count], Field(min_length=2, max_length=2)]


class _Anomalies(_Strict):
    """As ``hlat.resilience.AnomalyPolicy.state`` gives it."""

    losses: list[float]
    norms: list[float]
    skipped_steps: list[_Count]
    rollbacks: list[_Rollback]


class _Meta(_Strict):
    """A run's checkpoint has a recipe, imported weights have a model."""

    step: _Count = 0
    samples: _Count = 0
    tokens: _Count = 0
    recipe: dict[str, dict[str, Any] | list[dict[str, Any]]] = {}
    model: dict[str, Any] = {}
    data_fingerprint: str = ""
    versions: dict[str, str] = {}
    anomalies: _Anomalies | None = None
    special_ids: _SpecialIds = _SpecialIds()
    generation_ids: _SpecialIds = _SpecialIds()


def check_meta(data: bytes, step: int) -> None:
    """See that a checkpoint says of itself what its manifest says.

    Raises:
        CheckpointError: as ``parse_meta`` does, or it is of another step.
    """
    if (said := parse_meta(data).get("step", step)) != step:
        raise CheckpointError(f"{META_NAME} is of step {said}, the manifest of step {step}")


def parse_meta(data: bytes) -> dict[str, Any]:
    """Read what a checkpoint says of itself.

    Args:
        data: the file.

    Returns:
        Its JSON object, as it is.

    Raises:
        CheckpointError: it is none, or a field is of another type than hlat writes; all of them are named.
    """
    try:
        meta = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"{META_NAME} is not JSON ({exc})") from exc
    if not isinstance(meta, dict):
        raise CheckpointError(f"{META_NAME} is not a JSON object")
    try:
        _Meta.model_validate(meta)
    except ValidationError as exc:
        problems = [f"{'.'.join(map(str, one['loc']))[:100]}: {one['msg'].lower()}" for one in exc.errors()]
        more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
        named = "; ".join([*problems[:_LISTED], *more])
        raise CheckpointError(f"{META_NAME} is not what hlat writes: {named}") from None
    return meta
