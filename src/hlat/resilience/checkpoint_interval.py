"""Optimal checkpoint interval, and the goodput to expect.

    stall per save, mean time between failures, restart time --> optimal interval, expected goodput

J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
Systems 22 (2006), whose first-order form is J. W. Young's (1974). Failures are independent and exponentially
distributed, and may hit a save or a restart as well as a step.
"""

import math


def best_interval(stall: float, mtbf: float) -> float:
    """Return the seconds of training between two saves that maximize goodput (Daly 2006, equation 37).

    Args:
        stall: seconds that training stands still for a save.
        mtbf: mean seconds between failures.
    """
    if stall >= 2 * mtbf:
        return mtbf
    share = stall / (2 * mtbf)
    return math.sqrt(2 * stall * mtbf) * (1 + math.sqrt(share) / 3 + share / 9) - stall


def expected_goodput(interval: float, stall: float, mtbf: float, restart: float, delay: float = 0.0) -> float:
    """Return the share of time spent on steps that are not lost, 0 to 1 (Daly 2006, equation 20).

    Args:
        interval: seconds of training between two saves.
        stall: seconds that training stands still for a save.
        mtbf: mean seconds between failures.
        restart: seconds from a failure until training continues.
        delay: seconds from the stall until a background save is durable. A failure loses the training of these seconds
            too, as if the restart took that much longer.
    """
    wall = mtbf * math.exp((restart + delay) / mtbf) * math.expm1((interval + stall) / mtbf)
    return interval / wall
