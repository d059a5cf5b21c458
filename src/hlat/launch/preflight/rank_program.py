"""Program of a rank process: the work of a helper process.

    order "alone":    device, checks of the stage rank           --> facts, one line per measurement
    order "together": join the other processes, then checks of the stage together

Where a process must join before it uses its device, checks of the stage rank that need a device follow then.

What is printed goes into the log that the parent shows the end of if the process dies.
"""

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from hlat.config import Recipe
from hlat.launch.preflight.rank_measurements import MEASUREMENTS, RankPlace
from hlat.runtime.backend.device import configure_numerics, find_device_type, select_device
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.join import joined_run
from hlat.runtime.errors import HlatError
from hlat.runtime.helper_process import Channel
from hlat.runtime.process import RankInfo

Answer = Callable[[dict[str, Any]], None]

_WITHOUT_DEVICE = ("software",)  # modules of the stage rank that use no device


def follow_orders(channel: Channel) -> None:
    """Follow orders until the parent ends this process."""
    torch.set_grad_enabled(False)
    while True:
        order, _ = channel.receive()
        ORDERS[order["order"]](order, channel.send)
        channel.send({"done": True})


def alone(order: dict[str, Any], answer: Answer) -> None:
    """Measure in this process alone."""
    here, modules = RankInfo(order["local_rank"], order["nproc"], order["local_rank"]), order["modules"]
    try:
        device_type = find_device_type(order["device"])
        if _joins_first(device_type, order["world"]):
            device = torch.device(device_type)
            modules = [module for module in modules if module in _WITHOUT_DEVICE]
        else:
            device = select_device(device_type, here)
        configure_numerics(device)
        backend_of(device).configure_process()
    except (HlatError, RuntimeError) as error:
        answer({"module": "device", "error": _one_line(error)})
        return
    if order.get("recipe") is not None:
        plan = import_module("hlat.launch.preflight.recipe_needs")  # imports all of parallelism: one process does it
        recipe = Recipe.model_validate(order["recipe"])
        answer({"plan": plan.plan_needs(recipe, order["world"], device)})
    _measure(modules, RankPlace(device, order["rank"]), answer)


def together(order: dict[str, Any], answer: Answer) -> None:
    """Join the other processes, and measure with them."""
    os.environ.update(order["environment"])
    answer({"begin": "joining"})
    try:
        with joined_run(order["device"], folder=Path(order["folder"])) as runtime:
            place = RankPlace(runtime.device, runtime.rank, runtime.ranks, order["nproc"], order["groups"])
            is_new = _joins_first(runtime.device.type, order["world"])
            of_device = [each for each in order["rank_modules"] if is_new and each not in _WITHOUT_DEVICE]
            for module in [*of_device, *order["modules"]]:
                answer({"begin": module})
                _measure([module], place, answer, raises=True)
    except (HlatError, RuntimeError) as error:
        answer({"broken": _one_line(error)})


def _joins_first(device_type: str, world: int) -> bool:
    """Return True if a process of so many may use its device only after it has joined the others."""
    return world > 1 and backend_of(device_type).group_before_device


def _measure(modules: list[str], place: RankPlace, answer: Answer, raises: bool = False) -> None:
    for module in modules:
        try:
            answer({"module": module, "facts": MEASUREMENTS[module](place)})
        except (HlatError, RuntimeError, OSError) as error:
            answer({"module": module, "error": _one_line(error)})
            if raises:
                raise


def _one_line(error: Exception) -> str:
    return (str(error).strip().partition("\n")[0] or type(error).__name__).rstrip(".")


ORDERS: dict[str, Callable[[dict[str, Any], Answer], None]] = {"alone": alone, "together": together}
