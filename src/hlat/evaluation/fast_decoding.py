"""The fastest way to generate on this machine: compiled decoding steps, or else products by packed weights.

does the model have a compiled step here? --yes--> one call of C for each token (hlat.model.decoding)
                                          --no--> packed copies of the weights (packed_weights.py), or torch
"""

from collections.abc import Iterator
from contextlib import contextmanager

from hlat.evaluation.packed_weights import fits, pack_weights, packed_weights
from hlat.model import CompiledStep, Decoder, compile_step


def prepare_to_generate(decoder: Decoder) -> None:
    """Prepare a model that only generates and scores from now on; it can no longer be saved or trained."""
    step = _step(decoder)
    if step is None:
        pack_weights(decoder)
    else:
        _install(decoder, step)


@contextmanager
def fast_decoding(decoder: Decoder, tokens: int) -> Iterator[None]:
    """Decode as fast as possible within the block; the weights must not change in it.

    Args:
        decoder: the model, of which the block computes hidden states and logits only.
        tokens: number of tokens that the block generates, one after the other.
    """
    step = _step(decoder)
    if step is None:
        with packed_weights(decoder, tokens):
            yield
        return
    _install(decoder, step)
    try:
        yield
    finally:
        decoder.step = None
        vars(decoder.head).pop("forward", None)


def _step(decoder: Decoder) -> CompiledStep | None:
    """Build the compiled step, unless it would need copies of the weights that take too much memory."""
    compute, parameters = decoder.compute, list(decoder.parameters())
    copied = sum(each.numel() for each in parameters if compute is not None and each.dtype != compute)
    return compile_step(decoder) if compute is None or fits(decoder, copied * compute.itemsize) else None


def _install(decoder: Decoder, step: CompiledStep) -> None:
    decoder.step = step
    vars(decoder.head)["forward"] = step.head  # of this object: hooks are called as before
