"""Words for recomputation, sharding of state, and precision.

"selective" -> RecomputePolicy,  "FSDP FULL_SHARD" -> ZeRO stage,  "bf16 + fp8 (delayed scaling)" -> 16 or 8 bits
"""

from hlat.planner.calibration.reader.reading import Reading, UnreadableError
from hlat.planner.calibration.reader.texts import has_word, is_unstated, lower
from hlat.planner.problem import RecomputePolicy

UNKNOWN_RECOMPUTE = 0.1
"""Spread of a step whose recomputation is not stated: none and full differ by a third."""

# In this order: the first pattern that occurs decides.
_PROJECTIONS = r"(?:q?kv?o?|qkvo?|attention)[ _]?proj\w*|native_attention"
_RECOMPUTE: tuple[tuple[str, RecomputePolicy, float, str], ...] = (
    (r"partial|\d+ ?%|(?:\d+|some) (?:of|out of) \d+ layers?|block-?\d+|first \d+ layers", "full", 0.1,
     "some of the layers; read as all"),
    (r"save_dots?_with_no_batch\w*|dots?_with_no_batch\w*", "selective", 0.0,
     "JAX: products with weights are saved, attention's are not"),
    (r"offload (?!dots)\w+.*", "full", 0.05, "moves some named tensors to the host, and recomputes the rest"),
    (r"none|no|off|false|disabled|without|0|no-?(?:remat|recompute|ac|checkpointing)|save_everything", "none", 0.0, ""),
    (r"minimal(?:_| with )?(?:flash|context)\S*|minimal_with_context\S*", "none", 0.0,
     "MaxText saves every product and the context of attention"),
    (r"save_dot_except_mlp\w*", "full", 0.08, "MaxText recomputes the feed-forward products only; read as full"),
    (r"minimal\S*|dots?\w*|save_dots\w*", "selective", 0.0,
     "MaxText, JAX: products with weights are saved, attention's are not"),
    (r"selective[- _]?(?:op|operator|ops)|per-?op", "none", 0.03,
     "torchtitan's operator policy saves every second product and attention; read as none"),
    (r"selective.*(?:layer|block)|every (?:2nd|second|other|\d)|selective[ _-]?\d", "full", 0.1,
     "whole layers, some of them; read as all"),
    (rf"saves? (?:{_PROJECTIONS}).*", "full", 0.05,
     "keeps the projections of attention, and recomputes the rest"),
    (r"save_nothing", "full", 0.0, "JAX: recomputes everything"),
    (r"selective|attention|core[- _]?attn|attn", "selective", 0.0, ""),
    (r"qkv_proj\w*|save_\w+|custom\S*|decoder_layer_input\w*", "full", 0.05,
     "saves or moves to the host some named tensors, and recomputes the rest"),
    (r"full\S*|all|uniform|block|every layer|true|yes|on|1|complete|layer|checkpoint\w*|remat\w*|recompute\w*|enabled",
     "full", 0.0, ""),
)  # fmt: skip


def read_recompute(text: str | None) -> Reading[RecomputePolicy]:
    """Read the words for activation checkpointing.

    Raises:
        UnreadableError: the words are not understood.
    """
    if is_unstated(text):
        reason = "no activation checkpointing"
        return Reading("activation_ckpt", text or "", "none", "assumed", reason, UNKNOWN_RECOMPUTE)
    folded = lower(text)
    for pattern, policy, spread, reason in _RECOMPUTE:
        if has_word(pattern, folded):
            return Reading("activation_ckpt", text or "", policy, "implied" if reason else "stated", reason, spread)
    raise UnreadableError(f"activation checkpointing not understood: {text}")


def keeps_projections(text: str | None) -> bool:
    """True if recomputation is said to spare the projections of attention, so that the feed-forward block is left."""
    return has_word(_PROJECTIONS, lower(text))


_ZERO = (
    (r"zero[- _]?(?:stage[- _]?)?3|stage[- _]?3|fully[- ]sharded|full_shard|fsdp2?|hsdp|hybrid\w*|3", 3),
    (r"zero[- _]?(?:stage[- _]?)?2|stage[- _]?2|shard_grad_op|2", 2),
    (r"zero[- _]?(?:stage[- _]?)?1|stage[- _]?1|distributed[- ]optimizer|dist[- ]?opt|os|1", 1),
    (r"zero[- _]?(?:stage[- _]?)?0|stage[- _]?0|no_shard|ddp|none|no|0", 0),
)


def read_zero(text: str | None, framework: str, sharded_by_default: bool) -> Reading[int]:
    """Read the ZeRO stage; if not stated, the framework's words for it, then its default.

    Raises:
        UnreadableError: the words are not understood.
    """
    if not is_unstated(text):
        number = lower(text).removesuffix(".0")
        for pattern, stage in _ZERO:
            if has_word(pattern, number):
                hybrid = has_word(r"hsdp|hybrid\w*", number)
                reason = "hybrid: shards in groups whose size is not stated, read as all ranks" if hybrid else ""
                return Reading(
                    "zero_stage", text or "", stage, "implied" if hybrid else "stated", reason, 0.05 * hybrid
                )
        raise UnreadableError(f"sharding not understood: {text}")
    named = lower(framework)
    for pattern, stage in _ZERO:
        words = "|".join(part for part in pattern.split("|") if not part.isdigit() and part not in ("no", "none", "os"))
        if has_word(words, named):
            return Reading("zero_stage", text or "", stage, "implied", f"named by the framework: {framework}")
    if sharded_by_default:
        return Reading("zero_stage", text or "", 3, "implied", f"the default of {framework}", 0.02)
    return Reading("zero_stage", text or "", 0, "assumed", "no ZeRO", 0.05)


def read_eight_bit(text: str | None) -> Reading[bool]:
    """Read a precision: True if products run in 8 bits, False in 16.

    Raises:
        UnreadableError: not modelled (4 bits, integers, 32 bits), or not understood.
    """
    if is_unstated(text):
        return Reading("precision", text or "", False, "assumed", "16-bit products", 0.05)
    folded = lower(text)
    refused = r"nvfp4|mxfp4|fp4|int8|int4|fp6|mxfp6|fp64"
    if has_word(refused, folded):
        raise UnreadableError(f"precision not modelled: {text}")
    if has_word(r"(?:\w+[_-])?(?:mx)?(?:fp|float|f)8\w*|e4m3\w*|e5m2\w*|hybrid", folded):
        return Reading("precision", text or "", True)
    sixteen = r"(?:\w+[_-])?(?:bf16|fp16|bfloat16|float16|f16|half)\w*|mixed|amp|pure|16-?mixed|o[12]|16"
    if has_word(sixteen, folded):
        return Reading("precision", text or "", False)
    if has_word(r"fp32|float32|tf32|f32|single", folded):
        raise UnreadableError(f"precision not modelled: {text}")
    raise UnreadableError(f"precision not understood: {text}")
