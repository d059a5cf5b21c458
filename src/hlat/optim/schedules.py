"""Learning-rate schedules: pure functions of a step, so a resumed run needs no state of a scheduler. No torch.

schedule section, peak, horizon, step --learning_rate--> rate
recipe of a run or of a placed stage, step --rate_at--> rate
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from hlat.config import OwnScheduleConfig, Problem, Recipe, RecipeError, ScheduleConfig, own_parts

Shape = Callable[[ScheduleConfig, int, int], float]
"""Function of the schedule section, the horizon and a step after the warm-up to a share of the peak."""


def learning_rate(config: ScheduleConfig, *, peak: float, horizon: int, step: int, start: float = 0.0) -> float:
    """Compute the rate of a step, 1 for the first; from ``horizon`` on, where the schedule ends, the last rate.

    The warm-up leads from ``start``, whose step is 0, to the peak.
    """
    if step <= config.warmup_steps:
        return start + (peak - start) * step / config.warmup_steps
    return peak * schedule_shape(config)(config, horizon, min(step, horizon))


def rate_at(recipe: Recipe, step: int) -> float:
    """Compute the rate of a step of a run, 1 for the first; in a run with stages, of ``placed``'s recipe of one."""
    place, horizon, peak = recipe.place, recipe.horizon_steps, recipe.optimizer.lr
    if place is None:
        return learning_rate(recipe.schedule, peak=peak, horizon=horizon, step=step)
    peak = place.start if place.from_current else peak
    step -= place.schedule_first
    return learning_rate(recipe.schedule, peak=peak, horizon=horizon, step=step, start=place.start)


def placed(recipe: Recipe) -> Recipe:
    """Return the recipe of a stage with the rate from which its schedule starts: the last one of the stage before."""
    place = recipe.place
    if place is None or place.schedule_first == 0:
        return recipe
    each = [(stage, stage.place) for stage in place.run.each_stage()]
    before = next(stage for stage, its in each if its is not None and its.stop == place.schedule_first)
    return recipe.placed(replace(place, start=rate_at(placed(before), place.schedule_first)))


def schedule_shape(config: ScheduleConfig) -> Shape:
    """Return the shape of a schedule after its warm-up; RecipeError if one of the user's own cannot be used."""
    if not isinstance(config, OwnScheduleConfig):
        return _SHAPES[config.kind]
    wanted = "a function of section, horizon and step to a share of the peak"
    part = own_parts.load_part(own_parts.SCHEDULES, "schedule.kind", config.kind, wanted, callable)
    options = own_parts.options_class(part, given=("config", "horizon", "step"))
    also = tuple(ScheduleConfig.model_fields)
    return partial(part, **own_parts.read_options(options, config.own_options, "schedule", also).model_dump())


def check_schedule(config: ScheduleConfig, horizon: int) -> None:
    """Compute some rates of a schedule; RecipeError if one cannot be computed, or is no learning rate."""
    shape = schedule_shape(config)
    for step in sorted({config.warmup_steps + 1, (config.warmup_steps + horizon) // 2, horizon}):
        try:
            share = shape(config, horizon, step)
            reason = "" if math.isfinite(share) and share >= 0 else f"it gives {share!r} of the peak"
        except Exception as error:  # code of the user's own may raise anything
            reason = f"it fails: {type(error).__name__}: {error},"
        if reason:
            remedy = "It has to return a finite share of optimizer.lr, 0 or more, for every step."
            raise RecipeError([Problem("schedule.kind", f"{reason} at step {step}.", remedy, config.kind, True)])


def _cosine_wave(config: ScheduleConfig, horizon: int, step: int) -> float:
    progress = (step - config.warmup_steps) / max(1, horizon - config.warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * progress))  # from 1 at the end of the warm-up to 0 at the horizon


def _cosine(config: ScheduleConfig, horizon: int, step: int) -> float:
    return config.min_ratio + (1.0 - config.min_ratio) * _cosine_wave(config, horizon, step)


def _cosine_clipped(config: ScheduleConfig, horizon: int, step: int) -> float:
    # HLAT's schedule: it reaches the minimum well before the horizon.
    return max(config.min_ratio, _cosine_wave(config, horizon, step))


def _constant(config: ScheduleConfig, horizon: int, step: int) -> float:
    return 1.0


def _linear(config: ScheduleConfig, horizon: int, step: int) -> float:
    progress = (step - config.warmup_steps) / max(1, horizon - config.warmup_steps)
    return 1.0 - (1.0 - config.min_ratio) * progress


def _one_minus_root(config: ScheduleConfig, horizon: int, step: int) -> float:
    # The decay that was best for annealing in Haegele et al. 2024 (arXiv 2405.18392).
    progress = (step - config.warmup_steps) / max(1, horizon - config.warmup_steps)
    return 1.0 - (1.0 - config.min_ratio) * math.sqrt(progress)


def _wsd(config: ScheduleConfig, horizon: int, step: int) -> float:
    # Warm-up, stable, linear decay (Hu et al. 2024, MiniCPM).
    decay = max(1, round(config.decay_fraction * horizon))
    progress = max(0, step - (horizon - decay)) / decay
    return 1.0 - (1.0 - config.min_ratio) * progress


_SHAPES: dict[str, Shape] = {
    "cosine": _cosine,
    "cosine-clipped": _cosine_clipped,
    "constant": _constant,
    "wsd": _wsd,
    "linear": _linear,
    "1-sqrt": _one_minus_root,
}
