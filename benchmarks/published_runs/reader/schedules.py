"""Words for pipeline schedules, and for what is divided over the stages.

"1F1B + vocabulary parallel 2" -> PipelineWords(divides_head=True)
"""

from dataclasses import dataclass

from published_runs.reader.reading import Reading, UnreadableError
from published_runs.reader.texts import has_word, is_unstated, lower

_ORDINARY = r"1f1b|one[- ]forward[- ]one[- ]backward|interleaved|afab|gpipe|all[- ]forward[- ]all[- ]backward|none"
_SPLIT = r"zb\S*|zero[- ]?bubble\S*|interleaved[- ]zero[- ]bubble"
# Vocabulary parallelism (Yeung et al. 2024, arXiv 2411.05288) and interlaced pipelines (nnScaler, OSDI 2024).
_DIVIDED = r"vocab(?:ulary)?[- ]?parallel\S*|interlaced"
_BALANCED = r"(?:layers )?redistributed|redis|balanced"


@dataclass(frozen=True)
class PipelineWords:
    """Properties of a pipeline.

    Attributes:
        splits_backward: gradients of inputs and weights have passes of their own.
        divides_head: the head is divided over all stages.
        balances_stages: stages with embedding or head have fewer layers.
    """

    splits_backward: bool = False
    divides_head: bool = False
    balances_stages: bool = False


def read_schedule(text: str | None) -> Reading[PipelineWords]:
    """Read the words for a schedule.

    Raises:
        UnreadableError: the words are not understood.
    """
    if is_unstated(text):
        return Reading("pipeline_schedule", text or "", PipelineWords(), "implied", "1F1B, or interleaved")
    folded = lower(text)
    if not has_word(f"{_ORDINARY}|{_SPLIT}|{_DIVIDED}", folded):
        raise UnreadableError(f"pipeline schedule not modelled: {text}")
    divided = has_word(_DIVIDED, folded)
    words = PipelineWords(has_word(_SPLIT, folded), divided, has_word(_BALANCED, folded))
    if not divided:
        return Reading("pipeline_schedule", text or "", words)
    reason = "head divided evenly over the stages; its messages are not counted"
    return Reading("pipeline_schedule", text or "", words, "implied", reason, 0.05)
