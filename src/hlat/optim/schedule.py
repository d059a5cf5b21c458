"""The learning rate as a pure function of the step, so that a resumed run needs no scheduler state.

Steps are counted from 1: ``learning_rate(step=1)`` is the rate of the first update, 1 / warmup_steps of the peak, never
zero.
"""

import math

from hlat.config import ScheduleConfig


def learning_rate(config: ScheduleConfig, *, peak: float, horizon: int, step: int) -> float:
    """Compute the rate of a step, 1 for the first; from ``horizon`` on, where the schedule ends, the last rate."""
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    return peak * _SHAPES[config.kind](config, horizon, min(step, horizon))


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


def _wsd(config: ScheduleConfig, horizon: int, step: int) -> float:
    # Warm-up, stable, linear decay (Hu et al. 2024, MiniCPM).
    decay = max(1, round(config.decay_fraction * horizon))
    progress = max(0, step - (horizon - decay)) / decay
    return 1.0 - (1.0 - config.min_ratio) * progress


_SHAPES = {"cosine": _cosine, "cosine-clipped": _cosine_clipped, "constant": _constant, "wsd": _wsd}
