"""Work of ranks on the test device, for tests of its rules and of what hlat does about them."""

import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist


def compute(dtype: str) -> float:
    """Sum four ones of a dtype."""
    return float(torch.ones(4, device="neuron").to(getattr(torch, dtype)).float().sum().item())


def compute_deterministically() -> float:
    """Sum in torch's deterministic mode."""
    torch.set_deterministic_debug_mode("error")
    return float(torch.ones(4, device="neuron").sum().item())


def use_after_fork() -> int:
    """Start the runtime, fork, and use it in the child: the child's exit code."""
    torch.ones(1, device="neuron")
    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, device="neuron")
        except RuntimeError as error:
            os._exit(3 if "[fork]" in str(error) else 4)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def gradients() -> list[float]:
    """Differentiate attention and a norm, and compare with the CPU: the largest differences."""

    def grads(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(2, 4, 8, 16).to(device).requires_grad_()
        torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).square().mean().backward()
        w = torch.randn(16, 16).to(device).requires_grad_()
        torch.nn.functional.silu(torch.nn.functional.rms_norm(w @ w, (16,))).sum().backward()
        assert x.grad is not None and w.grad is not None
        return [x.grad.cpu(), w.grad.cpu()]

    return [float((ours - theirs).abs().max()) for ours, theirs in zip(grads("neuron"), grads("cpu"), strict=True)]


def _join() -> torch.device:
    dist.init_process_group("neuron")
    return torch.device("neuron", torch.accelerator.current_device_index())


def start_before_the_group(how: str) -> None:
    """Use the device before there is a group."""
    if how == "tensor":
        torch.ones(1, device="neuron")
    elif how == "select":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("neuron")


def see_devices() -> tuple[int, int]:
    """Number of devices and index of the own one, in a group."""
    device = _join()
    dist.all_reduce(torch.ones(1, device=device))  # rank 0, which has the store, ends only after all have joined
    return torch.accelerator.device_count(), torch.accelerator.current_device_index()


def use_device_of_another() -> None:
    """Select the device of the other rank."""
    _join()
    torch.accelerator.set_device_index(1 - dist.get_rank())


def collect(kind: str) -> Any:
    """Run one collective."""
    device = _join()
    rank, world = dist.get_rank(), dist.get_world_size()
    if kind == "int64":
        values = torch.ones(1, dtype=torch.int64, device=device)
        dist.all_reduce(values)
        return values.tolist()
    if kind == "broadcast":
        zero = torch.tensor([-0.0], device=device)
        dist.broadcast(zero, 0)
        return str(zero.tolist())
    if kind == "unequal":
        splits = [1, 2] if rank == 0 else [3, 4]
        out = torch.empty(4 if rank == 0 else 6, device=device)
        dist.all_to_all_single(
            out, torch.full((sum(splits),), float(rank), device=device), [1, 3] if rank == 0 else [2, 4], splits
        )
        return out.tolist()
    if kind == "send":
        value = torch.full((1,), float(rank), device=device)
        dist.send(value, 1) if rank == 0 else dist.recv(value, 0)
        return value.tolist()
    if kind == "barrier":
        dist.barrier()
        dist.barrier(group=dist.new_group(list(range(world - 1)))) if rank < world - 1 else dist.new_group(
            list(range(world - 1))
        )
        return None
    if kind == "group":  # irregular
        dist.new_group([0, 1, 3])
        dist.barrier()  # rank 0 has the store
        return None
    if kind == "coalesced":
        group: Any = dist.group.WORLD
        out = [torch.empty(1, size, device=device) for size in (2, 3)]
        given = [torch.ones(world, size, device=device) for size in (2, 3)]
        group.reduce_scatter_single_coalesced(out, given)
        return [each.tolist() for each in out]
    raise AssertionError(kind)


def regular(kind: str) -> Any:
    """Run collectives that a device has, and compare them with their definition."""
    device = _join()
    rank = dist.get_rank()
    values = torch.full((2,), rank + 1.0, device=device)
    if kind == "mean":
        dist.all_reduce(values, op=dist.ReduceOp.AVG)
        return values.tolist()
    gathered = torch.empty(4, device=device)
    dist.all_gather_into_tensor(gathered, values)  # names that every admitted torch has
    part = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(part, gathered)
    return gathered.tolist(), part.tolist()


def try_groups(broken: str) -> None:
    """Let hlat try a pipeline's group of which one operation does nothing, or fails."""
    from hlat.parallel.process_groups import SINGLE_PROCESS  # noqa: PLC0415
    from hlat.parallel.process_groups import try_groups as trial  # noqa: PLC0415
    from tests.support.neuron.process_group import NeuronGroup, SendingGroup  # noqa: PLC0415

    device = _join()
    plain = NeuronGroup.allreduce

    class Done:
        def wait(self, *_: object) -> bool:
            return True

        def is_completed(self) -> bool:
            return True

    def fail(*_: object) -> None:
        raise NotImplementedError("no such operation in this release")

    if broken == "dropped":  # as in a release whose eager collectives are without effect
        NeuronGroup.allreduce = (  # type: ignore
            lambda self, tensors, opts=None: plain(self, [each.clone() for each in tensors], opts)
        )
    elif broken == "send":
        SendingGroup.send = SendingGroup.recv = fail  # type: ignore
    elif broken == "bf16":
        NeuronGroup.allreduce = (  # type: ignore
            lambda self, tensors, opts=None: (
                fail() if tensors[0].dtype == torch.bfloat16 else plain(self, tensors, opts)
            )
        )
    pipeline = dist.group.WORLD
    trial(replace(SINGLE_PROCESS, pipeline=pipeline), device)
