"""Time left: of steps, with validations and saves to come, of a ramp, after a resume, of the data."""

import math
import re
from pathlib import Path

import pytest

from hlat.config import BatchSchedule
from hlat.config.sections.operation import TrackingConfig
from hlat.tracking import open_tracker
from hlat.tracking.console import ProgressBarConsole
from hlat.tracking.progress import DataProgress
from hlat.tracking.tracker import Eta
from tests.support.tracking.consoles import Clock, Terminal


def test_time_left_is_shown_from_the_second_step_on_and_every_step(tmp_path: Path) -> None:
    clock, output = Clock(), Terminal()
    config = TrackingConfig(console="rich", tensorboard=False)
    with open_tracker(tmp_path, config, total_steps=100, start_step=0, clock=clock, stream=output) as tracker:
        bar = tracker._console
        assert isinstance(bar, ProgressBarConsole)
        shown = [bar.render(79)]
        for step in (1, 2, 3):
            clock.now += 60.0 if step == 1 else 2.0  # the first step compiles
            tracker.step_done(step, 2.5 - step / 10, 1000)
            shown.append(bar.render(79))
    assert "step 0/100" in shown[0] and "first step" in shown[0]
    assert [re.findall(r"step \d+/100|eta .*", line) for line in shown[1:]] == [
        ["step 1/100", "eta -  loss 2.4000  17 tok/s"],  # no line was logged
        ["step 2/100", "eta 0:03:16  loss 2.3000  500 tok/s"],
        ["step 3/100", "eta 0:03:14  loss 2.2000  500 tok/s"],
    ]


# Seconds of merges of tokenizers 0.23: corpus and vocabulary, seconds in all, and the share of them at 5 %, 20 %, 50 %
# and 75 % of the merges. Of tinyshakespeare (1.1 MB), and of 10 MB of books.
_MERGING = [
    (1791, (0.319, 0.626, 0.809, 0.904)),
    (7935, (0.232, 0.486, 0.753, 0.881)),
    (16127, (0.456, 0.637, 0.791, 0.915)),
]


@pytest.mark.parametrize(("merges", "seconds"), _MERGING)
def test_the_time_left_of_a_tokenizer_is_within_a_factor_of_two_of_what_was_measured(merges: int, seconds) -> None:
    """A time left in proportion to the merges was up to nine times too long at 5 %, and far longer before."""
    clock = Clock()
    progress = DataProgress(clock)
    progress("train tokenizer", 0, merges)
    for share, at in zip((0.0501, 0.2, 0.5, 0.75), seconds, strict=True):
        clock.now = 1000 * at
        progress("train tokenizer", math.ceil(share * merges), merges)
        hours, minutes, second = map(int, progress.text().rpartition("eta ")[2].split(":"))
        total = clock.now + 3600 * hours + 60 * minutes + second
        assert 0.5 < total / 1000 < 2.0, (share, total)


def test_time_left_has_the_validations_and_saves_to_come_and_speed_has_none() -> None:
    """A run of 100 steps of a second, a validation of 20 s after every 10th and a save of 3 s after every 25th."""
    clock = Clock()
    breaks = {"validation": lambda step: 10 - step // 10, "saving": lambda step: (99 // 25) - step // 25}
    eta, end = Eta(100, clock, breaks=breaks), 100 * 1.0 + 10 * 20.0 + 3 * 3.0
    for step in range(1, 101):
        eta.enter("forward")
        clock.now += 1.0
        if step % 25 == 0 and step < 100:
            eta.enter("checkpoint")
            clock.now += 3.0
        if step % 10 == 0:
            eta.enter("evaluation")
            clock.now += 20.0
        eta.enter("between")
        left, speed = eta.mark(step), eta.speed(1000)
        assert speed == pytest.approx(1000.0)
        if step >= 25:  # one of each has been measured
            assert clock.now + left == pytest.approx(end)
    assert clock.now == end


def test_the_line_shows_how_far_a_validation_is_and_how_long_a_save_takes(tmp_path: Path) -> None:
    clock, output = Clock(), Terminal()
    bar = ProgressBarConsole(output, total_steps=100, start_step=0, clock=clock)

    def shown() -> str:
        return "  ".join(re.findall(r"step \d+/100|(?:validation|saving) \S+(?: s)?|eta \S+", bar.render(79)))

    bar.step({"step": 50, "loss": 2.5}, 100, None)
    bar.pause("validation")
    clock.now += 2.0
    assert shown() == "step 50/100  validation 2 s"  # nothing is known of its time
    for share, text in ((0.04, "validation 4%"), (0.1, "validation 10%  eta 0:00:18")):
        bar.pause("validation", share=share)
        assert shown() == f"step 50/100  {text}"
    bar.pause("")
    bar.step({"step": 99, "loss": 2.5}, 100, 14.0)
    bar.pause("saving", seconds=30.0)
    clock.now += 4.0
    assert shown() == "step 99/100  saving 4 s  eta 0:00:10"  # the time left of the run goes on
    clock.now += 16.0
    assert shown() == "step 99/100  saving 20 s  eta 0:00:10"  # it is over: what is left is that of the save
    bar.close()


def test_time_left_follows_the_recent_pace() -> None:
    clock = Clock()
    eta = Eta(total_steps=1000, clock=clock)
    for step in range(1, 301):
        clock.now += 1.0 if step <= 100 else 3.0
        left = eta.mark(step)
    assert left == 700 * 3.0


def test_time_left_of_a_ramp_is_in_proportion_to_the_samples() -> None:
    clock = Clock()
    eta = Eta(total_steps=100, clock=clock, batches=BatchSchedule(8, ((50, 2),)))
    for step in range(1, 41):
        clock.now += 2 * 0.25  # a quarter of a second for each sample
        left = eta.mark(step)
    assert left == (10 * 2 + 50 * 8) * 0.25


def test_time_left_after_a_resume_counts_only_the_steps_of_this_process() -> None:
    clock = Clock()
    clock.now = 1e6
    eta = Eta(total_steps=1000, clock=clock)
    assert eta.mark(905) is None
    clock.now += 10.0
    assert eta.mark(910) == 90 * 2.0
