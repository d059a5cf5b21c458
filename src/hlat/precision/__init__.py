"""Precision modes: the dtypes in which values are stored, computed, reduced and accumulated.

| mode       | weights | products | gradients | reduction | moments | compensation | bytes per parameter |
|------------|------|------|------|------|------|------|----|
| fp32       | fp32 | fp32 | fp32 | fp32 | fp32 |      | 16 |
| mixed      | fp32 | bf16 | fp32 | fp32 | fp32 |      | 16 |
| fp8        | fp32 | fp8, bf16 | fp32 | fp32 | fp32 |  | 16 |
| bf16-sr    | bf16, rounded stochastically | bf16 | bf16 | bf16 | bf16, rounded stochastically | | 8 |
| bf16       | bf16 | bf16 | bf16 | bf16 | bf16 |      | 8  |
| bf16-kahan | bf16 | bf16 | bf16 | bf16 | bf16 | bf16 | 10 |

Weights include the master copy, products the activations, gradients their accumulation. A checkpoint stores weights,
moments and compensation. Matrix products accumulate in fp32; norm statistics, softmax,
RoPE tables and the loss are fp32 in all modes. Within a step, mixed has a bf16 copy of the weights too (18 bytes).
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.precision.modes import AUTO as AUTO
    from hlat.precision.modes import MODES as MODES
    from hlat.precision.modes import Mode as Mode
    from hlat.precision.modes import check_fp8 as check_fp8
    from hlat.precision.modes import convert_to_fp8 as convert_to_fp8
    from hlat.precision.modes import resolve_mode as resolve_mode
    from hlat.precision.rounding import element_bits as element_bits
    from hlat.precision.rounding import line_bits as line_bits
    from hlat.precision.rounding import step_keys as step_keys
    from hlat.precision.rounding import stochastic_round as stochastic_round
    from hlat.precision.rounding import stream_keys as stream_keys

__getattr__ = lazily(
    __name__,
    {
        "modes": "AUTO MODES Mode check_fp8 convert_to_fp8 resolve_mode",
        "rounding": "element_bits line_bits step_keys stochastic_round stream_keys",
    },
)
