"""A rank process of the preflight with a fault: ``python -m tests.support.launch.odd_rank FAULT``."""

import os
import signal
import sys
import time

import torch

from hlat.launch.preflight import rank_program as rank_main
from hlat.launch.preflight.rank_measurements import RankTools


def flipped(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply, and flip the lowest bit of the mantissa of one element."""
    product = torch.mm(left, right)
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


FAULTS = {
    "flip": rank_main.together,
    "slow": lambda *order: (stop_now_and_then(), rank_main.together(*order)),
    "die": lambda *order: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda *order: time.sleep(600),
}

if __name__ == "__main__":
    fault = sys.argv[1]
    rank_main.ORDERS["together"] = FAULTS[fault]
    rank_main.main(RankTools(product=flipped) if fault == "flip" else None)
