"""A clock that is set, a stream that claims to be a terminal, and a line of metrics, for tests of consoles."""

import io

from hlat.config.sections.operation import TrackingConfig

PLAIN = TrackingConfig(console="plain", tensorboard=False)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def line(step: int, **more: object) -> dict[str, object]:
    return {
        "step": step,
        "tokens": step * 1000,
        "loss": 2.3412345,
        "grad_norm": 0.5187,
        "lr": 3e-4,
        "tokens_per_second": 12345.6,
        "mfu": 0.3124,
        "memory_bytes": 1288490189,
        "seconds": {"data": 0.1},
        **more,
    }
