"""Metadata of a checkpoint, ``meta.json``, and the types of its fields.

    bytes --parse_meta--> a mapping whose known fields have the types below; other fields are not checked

Every reader of a checkpoint uses this check, including ``verify_checkpoint``. So a file that was edited, with its
checksums updated, is reported as damage; it cannot cause an unexpected error later.
"""

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hlat.runtime.errors import CheckpointError

META_NAME = "meta.json"

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Ids = _Count | list[_Count] | None


_LISTED = 8


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _SpecialIds(_Strict):
    """Fields of ``hlat.model.hf.config.SpecialIds``."""

    model_config = ConfigDict(extra="forbid")
    bos: _Ids = None
    eos: _Ids = None
    pad: _Ids = None


class _Rollback(_Strict):
    step: _Count
    samples: Annotated[list[_Count], Field(min_length=2, max_length=2)]


class _Anomalies(_Strict):
    """Fields of ``hlat.resilience.AnomalyPolicy.state()``."""

    losses: list[float]
    norms: list[float]
    skipped_steps: list[_Count]
    rollbacks: list[_Rollback]


class _Meta(_Strict):
    """Fields of ``meta.json``. The checkpoint of a run has a recipe, imported weights have a model section."""

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


def parse_meta(data: bytes) -> dict[str, Any]:
    """Parse and check the metadata of a checkpoint.

    Args:
        data: content of ``meta.json``.

    Returns:
        The JSON object, unchanged.

    Raises:
        CheckpointError: it is not a JSON object, or fields have types that hlat does not write; lists all of them.
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
        problems = [f"{'.'.join(map(str, found['loc']))[:100]}: {found['msg'].lower()}" for found in exc.errors()]
        more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
        listed = "; ".join([*problems[:_LISTED], *more])
        raise CheckpointError(f"{META_NAME} has invalid fields: {listed}") from None
    return meta
