"""Parity of the device with a CPU, and of the device with itself: a small model, six steps, three precision modes.

CPU in float64 --distance--> CPU in the mode: how far its rounding moves losses, norms and gradients
                             device in the mode: has to be as near to the CPU; twice: the same bits
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from hlat.config import Recipe
from kit.child import Context
from kit.shapes import recipe
from kit.training import Trainer, device_of

_STEPS = 6
_UNITS = {"fp32": 2.0**-24, "mixed": 2.0**-9, "bf16-sr": 2.0**-9}  # relative error of one rounding
_ROUNDINGS = 12  # roundings of an activation in a block: norms, products, RoPE, attention, SwiGLU, residuals


@dataclass(frozen=True)
class Trace:
    """Numbers of some steps.

    Attributes:
        losses, norms: one for each step.
        gradients: of the first step, by name.
        begin, end: digests of the weights.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    begin: str
    end: str


def run(context: Context) -> None:
    """Compare each mode."""
    for mode in _UNITS:
        asked = recipe("parity", context.tiny, context.device, context.work, overrides(mode))
        with context.part(mode):
            compare(context, mode, asked)
    with context.part("waits"):
        count_waits(context)


def overrides(mode: str) -> dict[str, Any]:
    """Return the overrides of a recipe for this comparison: uncompiled, as the CPU is."""
    return {"precision.mode": mode, "run.compile": "none"}


def compare(context: Context, mode: str, asked: Recipe) -> None:
    """Compare a mode on the device with a CPU, and with itself."""
    host = asked.model_copy(update={"run": asked.run.model_copy(update={"device": "cpu"})})
    exact = trace(host.in_mode("fp32"), torch.float64)
    reference = trace(host)
    first, second = (trace(asked, device=device_of(context.device)) for _ in range(2))
    context.check(f"{mode}: the initial weights are those of a CPU", first.begin == reference.begin)
    same = (first.losses, first.norms, first.end) == (second.losses, second.norms, second.end)
    context.check(f"{mode}: two runs have the same bits", same, (first.losses, second.losses))
    for name in ("losses", "norms"):
        ours, theirs, true = (getattr(each, name) for each in (first, reference, exact))
        difference = [a - b for a, b in zip(ours, theirs, strict=True)]
        bound = allowed(mode, asked, theirs, true)
        context.found(
            {f"{mode}: {name}": ours, f"{mode}: {name} minus CPU": difference, f"{mode}: {name} bound": bound}
        )
        context.check(f"{mode}: {name} are those of a CPU", max(map(abs, difference)) <= bound, difference)
    errors = {name: gradient_errors(each, exact) for name, each in (("device", first), ("cpu", reference))}
    worst = max(errors["device"], key=lambda name: errors["device"][name])
    context.found({f"{mode}: worst gradient": [worst, errors["device"][worst], errors["cpu"][worst]]})
    wrong = {
        name: (error, errors["cpu"][name])
        for name, error in errors["device"].items()
        # The error of a tensor is a mean over its elements: the device's is like the CPU's, up to where each rounds.
        # Sums over all tokens of a step in another order add at most their length in units of fp32.
        if error > 2 * errors["cpu"][name] + asked.tokens_per_step * _UNITS["fp32"]
    }
    context.check(f"{mode}: gradients are as near to float64 as a CPU's", not wrong, dict(list(wrong.items())[:5]))


def allowed(mode: str, asked: Recipe, reference: list[float], exact: list[float]) -> float:
    """Return the largest difference from the CPU that rounding explains.

    Both sides are as far from float64 as their rounding moves this trajectory. One trajectory shows how far that is;
    four times the largest of its distances holds for another with the same distribution. A distance can be small by
    chance, so a floor is added: the error of one forward pass, a mean over tokens of independent errors of the
    logits in bf16, or the longest sum in fp32.
    """
    distance = max(abs(a - b) for a, b in zip(reference, exact, strict=True))
    tokens, size = asked.tokens_per_step, max(map(abs, exact))
    if mode == "fp32":
        floor = size * _UNITS[mode] * max(tokens, asked.model.vocab_size)
    else:
        floor = 4 * size * _UNITS[mode] * math.sqrt(_ROUNDINGS * asked.model.layers / tokens)
    return 4 * distance + floor


def trace(asked: Recipe, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Trace:
    """Train some steps; on the CPU unless a device is given.

    Gradients are those of the first step, computed before it: nothing of them is left when the step begins.
    """
    trainer = Trainer(asked, device or torch.device("cpu"), dtype)
    begin = trainer.digest()
    trainer.gradients()
    gradients = trainer.named_gradients()
    trainer.optimizer.zero_grad(set_to_none=True)
    steps = [trainer.step() for _ in range(_STEPS)]
    return Trace([step.loss for step in steps], [step.norm for step in steps], gradients, begin, trainer.digest())


def gradient_errors(found: Trace, exact: Trace) -> dict[str, float]:
    """Return the error of each gradient relative to its norm."""
    return {
        name: float((found.gradients[name] - true).norm() / true.norm().clamp_min(1e-30))
        for name, true in exact.gradients.items()
    }


def count_waits(context: Context) -> None:
    """Count how often the host waits for the device in a step that is not logged: once, for the verdict."""
    module = torch.get_device_module(context.device)
    if not hasattr(module, "set_sync_debug_mode"):
        context.skip("waits", "torch does not report waits for such devices")
        return
    trainer = Trainer(recipe("parity", context.tiny, context.device, context.work, overrides("mixed")))
    trainer.step(), trainer.step()
    module.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.step()
    finally:
        module.set_sync_debug_mode("default")
    waits = [
        f"{each.filename}:{each.lineno}: {each.message}"[:300] for each in caught if "synchron" in str(each.message)
    ]
    context.found({"waits_per_step": len(waits), "waits": waits})
