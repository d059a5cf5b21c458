"""No rank unpickles data from another rank: data read from a socket could otherwise run code."""

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.distributed.join import Runtime
from tests.support.distributed.jobs import train
from tests.support.distributed.layouts import SOME, Case, recipe_content
from tests.support.distributed.workers import Pool


def _refuse(*arguments: object, **options: object) -> Any:
    raise AssertionError("objects of another process would be unpickled")


def without_pickle(runtime: Runtime, content: dict[str, Any]) -> list[float]:
    """Train some steps in a layout, in processes where torch can neither send nor receive pickles."""
    kept = {name: getattr(distributed_c10d, name) for name in ("_object_to_tensor", "_tensor_to_object")}
    for name in kept:
        setattr(distributed_c10d, name, _refuse)
    try:
        with pytest.raises(AssertionError):
            dist.broadcast_object_list([1], src=runtime.rank)
        return train(runtime, content, 2, torch.float32).losses
    finally:
        for name, function in kept.items():
            setattr(distributed_c10d, name, function)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_torch_sends_no_pickles_in_a_layout(case: Case, pool: Pool) -> None:
    """DeviceMesh, FSDP2 and pipelines of torch can use object collectives; as hlat calls them, they never do."""
    assert pool.run(case.world, without_pickle, recipe_content(case))


class _Trap:
    """Object that runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("import os; os.environ['HLAT_TRAPPED'] = '1'",)


def send_a_pickle(runtime: Runtime) -> tuple[str, bool]:
    """Send, on rank 1, data that torch's object collectives would unpickle, instead of a message."""
    import os  # noqa: PLC0415

    try:
        if runtime.rank == 1:
            message = pickle.dumps(_Trap())
            head = torch.zeros(1024, dtype=torch.uint8)
            sent = len(message).to_bytes(8, "little") + message
            head[: len(sent)] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
            dist.all_gather([torch.empty_like(head) for _ in range(2)], head, group=runtime.ranks.group)
            return "", False
        HostGroup.all_gather(runtime.ranks, 1)
    except Exception as error:
        return f"{type(error).__name__}: {error}", "HLAT_TRAPPED" in os.environ
    return "nothing was noticed", "HLAT_TRAPPED" in os.environ


def test_a_pickle_instead_of_a_message_is_rejected_and_runs_no_code(pool: Pool) -> None:
    (message, ran), _ = pool.run(2, send_a_pickle)
    assert not ran and message.startswith("LaunchError: received an invalid message instead of rank 1's")
