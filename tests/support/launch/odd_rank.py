"""Rank processes of the preflight with a fault each, as works of helper processes."""

import os
import signal
import time
from collections.abc import Callable

import torch

from hlat.launch.preflight import rank_program
from hlat.runtime.helper_process import Channel

multiply, now = torch.mm, time.time


def flipped(left: torch.Tensor, right: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
    """Multiply, and flip the lowest bit of the mantissa of one element, but where only the rate is measured."""
    product = multiply(left, right, **options)
    if not options:
        product.view(torch.int32)[17, 4] ^= 1
    return product


def stop_now_and_then() -> None:
    """Start a process that stops this one for 19 of every 20 moments."""
    pid = os.getpid()
    if os.fork():
        return
    while os.getppid() == pid:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.19)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)
    os._exit(0)


def follow(channel: Channel, together: Callable[..., object]) -> None:
    """Follow orders, the one to measure together by a function."""
    rank_program.ORDERS["together"] = together
    rank_program.follow_orders(channel)


def flip(channel: Channel) -> None:
    torch.mm = flipped
    rank_program.follow_orders(channel)


def ahead(channel: Channel) -> None:
    time.time = lambda: now() + 30
    rank_program.follow_orders(channel)


def slow(channel: Channel) -> None:
    follow(channel, lambda *order: (stop_now_and_then(), rank_program.together(*order)))


def die(channel: Channel) -> None:
    follow(channel, lambda *order: os.kill(os.getpid(), signal.SIGKILL))


def hang(channel: Channel) -> None:
    follow(channel, lambda *order: time.sleep(600))


def asleep(channel: Channel) -> None:
    time.sleep(600)
