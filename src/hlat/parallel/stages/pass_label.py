"""Labels of passes in profiles: the kind of a pass, its stage and its micro-batch.

pass_label("forward", 3, 5) -> "hlat::forward stage 3 micro-batch 5" in a profile -> parse_pass_label
"""

import re
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

from torch.profiler import record_function

from hlat.parallel.stages.pipeline_order import PassKind

_LABEL = re.compile(r"hlat::(\w+) stage (\d+) micro-batch (\d+)")


class LabelledPass(NamedTuple):
    """A pass of a micro-batch through a stage, both counted from 0."""

    kind: PassKind
    stage: int
    micro_batch: int


def pass_label(kind: PassKind, stage: int, micro_batch: int) -> AbstractContextManager[Any]:
    """Label everything in the block, for profilers and rehearsals."""
    return record_function(f"hlat::{kind} stage {stage} micro-batch {micro_batch}")


def parse_pass_label(text: str) -> LabelledPass | None:
    """Return the pass that a label names; None for labels of others."""
    found = _LABEL.fullmatch(text)
    return None if found is None else LabelledPass(cast("PassKind", found[1]), int(found[2]), int(found[3]))
