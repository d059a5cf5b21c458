"""Worker process of the launch tests: ``python worker.py SCENARIO FOLDER``.

It is a small stand-in for a run: it joins, communicates, and ends as its scenario prescribes.
"""

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from hlat.config import Problem, RecipeError
from hlat.launch import worker_context
from hlat.runtime.distributed.host_collectives import AsyncMax
from hlat.runtime.distributed.join import check_consistent, joined_run
from hlat.runtime.errors import DataError, StorageError
from hlat.runtime.logs import rank_log
from hlat.runtime.process import STOP_SIGNALS, stop_exit_code


def outcome_of(action):
    """Outcome of an action as JSON: its result, or type, message and origin of its error."""
    try:
        return {"result": action()}
    except Exception as error:
        return {"type": type(error).__name__, "message": str(error), "from": getattr(error, "from_rank", None)}


def only_on(rank, runtime, error):
    """Return an action that fails on one rank."""

    def action():
        if runtime.rank == rank:
            raise error
        return runtime.rank * 10

    return action


def collectives(runtime, folder):
    """Use every collective and check; write the values of each rank to a file."""
    ranks, rank = runtime.ranks, runtime.rank
    values = {"world": ranks.world, "is_first": ranks.is_first, "threads": torch.get_num_threads()}
    values["interface"] = os.environ["GLOO_SOCKET_IFNAME"]
    values["session_leader"] = os.getsid(0) == os.getpid()
    values["broadcast"] = ranks.broadcast({"from": rank})
    values["gather"] = ranks.gather(rank * rank)
    values["all_gather"] = ranks.all_gather([rank] * rank)  # lists of different sizes
    ranks.barrier()

    recipe_error = RecipeError([Problem("model.heads", "too many", "take 4", 9, True)])
    values["first"] = outcome_of(lambda: ranks.run_on_rank0(lambda: {"asked": rank}))
    values["first_refused"] = outcome_of(lambda: ranks.run_on_rank0(only_on(0, runtime, recipe_error)))
    values["first_bug"] = outcome_of(lambda: ranks.run_on_rank0(only_on(0, runtime, ZeroDivisionError("oh"))))
    values["each"] = outcome_of(lambda: ranks.run_on_all(only_on(-1, runtime, None)))
    values["each_refused"] = outcome_of(lambda: ranks.run_on_all(only_on(1, runtime, StorageError("disk full"))))
    values["each_bug"] = outcome_of(lambda: ranks.run_on_all(only_on(2, runtime, KeyError("x"))))

    def all_but_first():
        if rank:
            raise DataError(f"shard {rank}")

    values["each_two"] = outcome_of(lambda: ranks.run_on_all(all_but_first))
    try:
        ranks.run_on_rank0(only_on(0, runtime, recipe_error))
    except RecipeError as error:
        values["problems"] = [problem.path for problem in error.problems]

    maximum, votes = AsyncMax(ranks), []
    for step in range(3):
        maximum.start(signal.SIGTERM if (rank, step) == (1, 1) else 0)
        votes.append(maximum.result())
    values["votes"] = votes
    # Another collective runs between start and result: neither may disturb the other.
    maximum.start(rank)
    values["between"] = ranks.all_gather(rank)
    values["last_vote"] = maximum.result()

    facts = {"recipe": {"batch.micro_batch": 4, "data.path": "a"}, "code": {"source": "f00"}, "data": {"tokens": 5}}
    values["same"] = outcome_of(lambda: check_consistent(ranks, facts))
    other = {**facts, "recipe": {"batch.micro_batch": 8, "data.path": "a"}} if rank == 2 else facts
    values["other_recipe"] = outcome_of(lambda: check_consistent(ranks, other))
    other = {**facts, "code": {"source": "bad", "torch": "2.11"}} if rank == 0 else facts
    other = {**other, "data": {"tokens": rank}}
    values["other_code_and_data"] = outcome_of(lambda: check_consistent(ranks, other))

    total = torch.ones(1) * (rank + 1)
    dist.all_reduce(total)  # the default group, for tensors
    values["all_reduce"] = total.item()
    values["isatty"] = sys.stdout.isatty()

    print(f"python of rank {rank}")
    warnings.warn(f"warning of rank {rank}", stacklevel=1)
    os.write(2, f"descriptor of rank {rank}\n".encode())
    (folder / f"seen-{rank}.json").write_text(json.dumps(values))


def refused_on_one(runtime, folder):
    """Raise a user error on rank 1 while rank 0 waits for it."""
    if runtime.rank == 1:
        raise StorageError("run.dir /full: no space left")
    runtime.ranks.barrier()


def bug_on_one(runtime, folder):
    """Raise a bug on rank 1 while rank 0 is in a collective of the model."""
    if runtime.rank == 1:
        raise ZeroDivisionError("loss / tokens")
    dist.all_reduce(torch.ones(8))


def killed(runtime, folder):
    """Kill rank 1, as the system does when memory runs out, while rank 0 does not communicate at all."""
    joined = folder / "joined-0"  # rank 0 may still be connecting to rank 1
    if runtime.rank == 0:
        joined.touch()
    else:
        while not joined.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def wait_to_stop(runtime, folder):
    """Step until a signal has reached any rank, then save slowly on all ranks and stop; a second signal aborts."""
    received = []

    def receive(number, frame):
        received.append(number)
        (folder / f"received-{runtime.rank}").write_text(" ".join(map(str, received)))
        if len(received) > 1:
            raise KeyboardInterrupt

    for number in STOP_SIGNALS:
        signal.signal(number, receive)
    maximum, stop = AsyncMax(runtime.ranks), 0
    (folder / f"pid-{runtime.rank}").write_text(str(os.getpid()))
    while not stop:
        maximum.start(received[0] if received else 0)
        time.sleep(0.02)
        stop = maximum.result()
    (folder / f"saving-{runtime.rank}").touch()
    time.sleep(float(os.environ.get("SAVE_SECONDS", "0.5")))
    (folder / f"saved-{runtime.rank}").touch()
    return stop_exit_code(stop)


SCENARIOS = [collectives, refused_on_one, bug_on_one, killed, wait_to_stop]


def main():
    scenario, folder = sys.argv[1], Path(sys.argv[2])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    (folder / "run").mkdir(exist_ok=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # as the command does
    with worker_context():
        action = {function.__name__: function for function in SCENARIOS}[scenario]
        with rank_log(folder / "run", rank, world), joined_run("cpu") as runtime:
            return action(runtime, folder)


if __name__ == "__main__":
    sys.exit(main())
