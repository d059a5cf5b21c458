"""Speed and memory of a training step of one case, beside rehearsal and plan.

case --Trainer--> first step: compiled --> steps of the clock: seconds, tokens/s, MFU --> a step under the profiler
"""

import json
import statistics
from typing import Any

import torch

from hlat.config import Recipe
from hlat.hardware import peak_flops
from hlat.model import attention_kernel, recipe_heads
from hlat.model.counts import flops_per_token
from hlat.precision import MODES
from kit import nvidia_smi
from kit.child import Context
from kit.shapes import case_recipe
from kit.training import Trainer, forget_peaks, memory, quick_compiler

_STEPS, _KERNELS = 5, 15
# Two ways to compute the same model in bf16: each logit differs by some units of 2^-9, and the loss is the mean of
# thousands of tokens, whose errors have both signs. One unit of bf16 at 1 bounds it with room; a wrong mask or a
# missing product moves the loss of later steps by more.
_BF16_UNIT = 2.0**-8


def run(context: Context, case: str) -> None:
    """Measure a case."""
    with quick_compiler(context.device):
        recipe = case_recipe(case, context.tiny, context.device, context.work)
        with context.part("build"):
            trainer = Trainer(recipe)
            context.found({"parameters": sum(each.tensor.numel() for each in trainer.model.local_parameters)})
        if not context.errors:
            _measure(context, case, trainer)


def _measure(context: Context, case: str, trainer: Trainer) -> None:
    with context.part("first step"):
        first = trainer.step()
        context.found({"first_step_seconds": first.seconds, "cache": _cache_counters(), "losses": [first.loss]})
        context.found(_attention(trainer))
        trainer.step()  # creates what only the second step needs
    with context.part("steps"):
        forget_peaks(trainer.device)
        steps = [trainer.step() for _ in range(2 if context.tiny else _STEPS)]
        context.found({"losses": [first.loss, *(step.loss for step in steps)], "norms": [step.norm for step in steps]})
        context.found(_rates(trainer, statistics.median(step.seconds for step in steps)))
        context.found({"step_seconds_of_each": [step.seconds for step in steps]} | _memory(trainer))
        finite = all(torch.isfinite(torch.tensor([step.loss, step.norm])).all() for step in steps)
        context.check("loss and norm are finite", bool(finite))
        context.check(
            "the loss falls on a batch that it sees again", steps[-1].loss < first.loss, context.numbers["losses"]
        )
    with context.part("other cases"):
        _compare_losses(context, case)
    with context.part("kernels"):
        context.found(profiled(trainer))


def _rates(trainer: Trainer, seconds: float) -> dict[str, float]:
    recipe = trainer.recipe
    rate = recipe.tokens_per_step / seconds
    peak = peak_flops(trainer.device, MODES[recipe.precision.mode].compute).value
    share = {name: _flops(recipe, name) * rate / peak for name in ("causal", "full")}
    return {"step_seconds": seconds, "tokens_per_second": rate, "peak_flops": peak} | {
        f"mfu_{name}": value for name, value in share.items()
    }


def _flops(recipe: Recipe, convention: Any) -> float:
    return flops_per_token(recipe.model, recipe.data.sequence_length, convention)


def _memory(trainer: Trainer) -> dict[str, Any]:
    used = nvidia_smi.used_mib()
    return memory(trainer.device) | ({} if used is None else {"used_gib": used / 1024})


def _attention(trainer: Trainer) -> dict[str, str]:
    """Name the kernel that a run would get on this device."""
    recipe = trainer.recipe
    heads, deterministic = recipe_heads(recipe), recipe.run.determinism is not False
    return {"attention": str(attention_kernel(heads, deterministic, trainer.device))}


def _cache_counters() -> dict[str, int]:
    """Return how often compiled code was found in the cache, as torch counts it."""
    from torch._dynamo.utils import counters

    names = (name for name in counters["inductor"] if "cache" in name)
    return {name: counters["inductor"][name] for name in names}


def _compare_losses(context: Context, case: str) -> None:
    """Compare the first losses with those of the case that computes the same model, if it has run."""
    name = {"r8-fast": "r8", "r8-eager": "r8", "1b-fast": "1b", "r8-fp8": "r8", "r8-bf16-sr": "r8"}.get(case)
    losses = context.numbers["losses"]
    file = context.work / "results" / f"losses-{case}.txt"
    file.write_text(json.dumps(losses))
    other = context.work / "results" / f"losses-{name}.txt"
    if name is None or not other.is_file():
        return
    theirs = json.loads(other.read_text())
    context.found({f"losses minus those of {name}": [a - b for a, b in zip(losses, theirs, strict=False)]})
    if case in ("r8-fast", "r8-eager", "1b-fast"):  # others round more coarsely: their differences are for people
        difference = abs(losses[0] - theirs[0])
        context.check(
            f"the first loss is that of {name}, as bf16 rounds", difference < _BF16_UNIT * losses[0], difference
        )


def profiled(trainer: Trainer) -> dict[str, Any]:
    """Profile one step: seconds of the slowest kernels, and by kind of work as ``hlat train --profile`` sorts them."""
    from torch.profiler import profile

    from hlat.training.process import kind_of

    try:
        with profile() as running:
            seconds = trainer.step().seconds
    except RuntimeError as error:  # some virtual machines do not let the profiler at the GPU
        return {"profiler": f"failed: {str(error)[:500]}"}
    events = [(event.key, event.self_device_time_total, event.count) for event in running.key_averages()]
    if not any(time for _, time, _ in events):
        events = [(event.key, event.self_cpu_time_total, event.count) for event in running.key_averages()]
    # Operators of the CPU have no time of their own on the device, so that no kernel counts twice.
    events = sorted((event for event in events if event[1] > 0), key=lambda event: -event[1])
    kinds: dict[str, float] = {}
    for name, time, _ in events:
        kinds[kind_of(name)] = kinds.get(kind_of(name), 0.0) + time / 1e6
    slowest = [{"name": name[:160], "seconds": time / 1e6, "calls": count} for name, time, count in events[:_KERNELS]]
    return {"profiled_step_seconds": seconds, "seconds_by_kind": kinds, "slowest_kernels": slowest}
