"""How often to save: often enough to lose little, rarely enough to train.

    seconds that a save stalls, mean time between failures, seconds to be back --> the best interval, goodput to expect

J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
Systems 22 (2006), whose first-order form is J. W. Young's (1974): failures come at random, independently of each other
(exponentially distributed), and may hit a save or a restart as well as a step.
"""

import math


def best_interval(stall: float, mtbf: float) -> float:
    """Seconds of training between two saves that cost least (Daly 2006, equation 37).

    Args:
        stall: seconds that training stands still for a save.
        mtbf: mean seconds between failures.
    """
    if stall >= 2 * mtbf:
        return mtbf
    share = stall / (2 * mtbf)
    return math.sqrt(2 * stall * mtbf) * (1 + math.sqrt(share) / 3 + share / 9) - stall


def expected_goodput(interval: float, stall: float, mtbf: float, restart: float, delay: float = 0.0) -> float:
    """The share of time that is spent on steps that count, 0 to 1 (Daly 2006, equation 20).

    Args:
        interval: seconds of training between two saves.
        stall: seconds that training stands still for a save.
        mtbf: mean seconds between failures.
        restart: seconds from a failure until steps go on.
        delay: seconds from the stall until the save is durable, written in the background: a failure loses what was
            trained in them too, as if the restart took so much longer.
    """
    wall = mtbf * math.exp((restart + delay) / mtbf) * math.expm1((interval + stall) / mtbf)
    return interval / wall
