"""Metrics as text for people: progress, main values, durations, rates and sizes."""

import math
from collections.abc import Callable

from hlat.tracking.metrics import Metrics

_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_GIB, _MIB = 1 << 30, 1 << 20


def progress(step: int, total_steps: int, eta_seconds: float | None) -> str:
    """Format step, share of the run and time left."""
    eta = "-" if eta_seconds is None else duration(eta_seconds)
    return f"step {step}/{total_steps}  {step / total_steps:.1%}  eta {eta}"


# In the order of interest: a terminal of 80 columns shows the bar up to mfu.
_FORMATS: dict[str, Callable[[float], str]] = {
    "tokens_per_second": lambda value: f"{rate(value)} tok/s",
    "mfu": lambda value: f"mfu {value:.1%}",
    "grad_norm": lambda value: f"gnorm {value:.2f}",
    "lr": lambda value: f"lr {value:.2e}",
    "memory_bytes": lambda value: f"mem {size(value)}",
}


def values(metrics: Metrics) -> str:
    """Format the main metrics of a step, in a fixed order; missing ones are left out."""
    return "  ".join(text for _, text in named_values(metrics))


def named_values(metrics: Metrics) -> list[tuple[str, str]]:
    """Return the main metrics of a step that there are, in a fixed order: name and text."""
    found = [("loss", f"loss {metrics['loss']:.4f}")] if "loss" in metrics else []
    if "val_loss" in metrics:
        bits = f" (bpb {metrics['val_bits_per_byte']:.4f})" if "val_bits_per_byte" in metrics else ""
        found.append(("val_loss", f"val {metrics['val_loss']:.4f}{bits}"))
    for key, value in metrics.items():
        if key.startswith("val/") and key.endswith("/loss") and key.count("/") == 2:  # not each source of the split
            found.append((key, f"val {key.split('/')[1]} {value:.4f}"))
        elif key.startswith("task/") and key.endswith("/acc"):
            found.append((key, f"{key.split('/')[1]} {value:.1%}"))
    return found + [(key, form(metrics[key])) for key, form in _FORMATS.items() if key in metrics]


def duration(seconds: float) -> str:
    """Format seconds as ``0:03:12``, or ``2d 04:00:00`` from a day on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d {hour:02}:{minute:02}:{second:02}" if days else f"{hour}:{minute:02}:{second:02}"


def rate(value: float) -> str:
    """Format a number with an SI prefix, as ``12.3k``; NaN and infinity by name."""
    if not math.isfinite(value):
        return str(value)
    # Chosen after rounding, so that 999,960 is 1.0M and not 1000.0k.
    return next((f"{value / unit:.1f}{prefix}" for unit, prefix in _SI if value >= 0.99995 * unit), f"{value:.0f}")


def size(count: float) -> str:
    """Format bytes as ``1.2G`` (GiB) or ``812M`` (MiB)."""
    return f"{count / _GIB:.1f}G" if count >= _GIB else f"{count / _MIB:.0f}M"
