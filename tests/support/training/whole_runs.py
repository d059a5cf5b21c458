"""Complete runs of hlat in separate processes, computed in float64, with a clock that only phase changes advance.

recipe, ranks -> hlat.training.run on each rank -> run folder, and rank 0's log of its phases
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.commands import forking
from tests.support.launch.ports import free_port

PEAK = 3.0e9
"""Peak FLOP/s of a process."""

_TIMEOUT = 300.0


@dataclass
class PhaseLog:
    """Clock that advances only when a phase begins, and a log of the phases.

    Seconds are eighths, so that sums of them are exact.
    """

    now: float = 0.0
    entries: list[tuple[str, float]] = field(default_factory=list)  # phase, and the time when it began

    def __call__(self, phase: str) -> None:
        """Begin a phase; the previous one lasted between 1/8 and 11/8 s."""
        self.now += (len(self.entries) * 7 % 11 + 1) / 8
        self.entries.append((phase, self.now))


def train(content: dict[str, Any], world: int, folder: Path) -> list[tuple[str, float]]:
    """Run a recipe on ``world`` ranks; return the entries of rank 0's phase log."""
    phase_log, port = folder / "phase_log.json", free_port()
    ranks = [forking().Process(target=_rank, args=(content, rank, world, port, phase_log)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(_TIMEOUT)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        if process.exitcode is None:
            process.kill()
            process.join()
    assert codes == [0] * world, codes
    return [(phase, start) for phase, start in json.loads(phase_log.read_text())]


def _rank(content: dict[str, Any], rank: int, world: int, port: int, file: Path) -> None:
    place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()} | {"OMP_NUM_THREADS": "1"})
    import torch  # noqa: PLC0415  (after the number of threads is set)

    from hlat.config.load import parse_recipe  # noqa: PLC0415
    from hlat.hardware import PeakFlops  # noqa: PLC0415
    from hlat.precision import MODES, Mode  # noqa: PLC0415
    from hlat.runtime.progress import observe_phases  # noqa: PLC0415
    from hlat.training import loop, run_state  # noqa: PLC0415

    torch.set_num_threads(1)
    MODES["fp32"] = Mode(*[torch.float64] * 5)  # this process's own copy of the table
    phase_log = PhaseLog()
    run_state.peak_flops = lambda *_: PeakFlops(PEAK, "given")
    timer = loop.PhaseTimer
    loop.PhaseTimer = lambda: timer(clock=lambda: phase_log.now)
    with observe_phases(phase_log):
        loop.run(parse_recipe(content, world=world))
    if rank == 0:
        file.write_text(json.dumps(phase_log.entries))
