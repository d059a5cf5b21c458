"""A real Slurm: its tasks are the processes of one run, and what it does not say is asked for."""

import json
import re
import subprocess
import sys
from datetime import datetime

import pytest

from hlat.runtime import slurm
from tests.support.launch.slurm_cluster import cluster, missing

_TOLD = """
import json, os
from hlat.runtime import slurm
print(json.dumps({"found": slurm.variables(), "end": slurm.end_of_job()}))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The environment of a Slurm of two machines."""
    if missing():
        pytest.skip(missing())
    with cluster(tmp_path_factory.mktemp("slurm"), 2) as found:
        yield found


def told(environment, *command):
    """What processes that Slurm started say, one after another."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return done, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_tasks_of_a_step_are_one_run(environment):
    done, said = told(environment, "srun", "-N2", "-n2", "--time=7", sys.executable, "-c", _TOLD)
    assert done.returncode == 0, done.stderr
    found = sorted((one["found"] for one in said), key=lambda one: one["RANK"])
    assert [(one["RANK"], one["GROUP_RANK"], one["LOCAL_RANK"]) for one in found] == [("0", "0", "0"), ("1", "1", "0")]
    assert {(one["WORLD_SIZE"], one["MASTER_ADDR"]) for one in found} == {("2", "127.0.0.1")}  # n0 is no name here
    assert len({one["MASTER_PORT"] for one in found}) == 1


def test_the_end_of_a_job_is_that_of_squeue(environment):
    script = f"squeue -h -j $SLURM_JOB_ID -o %e; unset SLURM_JOB_END_TIME; exec {sys.executable} -c '{_TOLD}'"
    done, said = told(environment, "srun", "-n1", "--time=7", "bash", "-c", script)
    assert done.returncode == 0, done.stderr
    assert said[0]["end"] == datetime.fromisoformat(done.stdout.splitlines()[0]).timestamp()
    assert said[0]["found"] == {}, "one task is one process"


def test_the_first_host_is_that_of_scontrol(environment):
    for nodes in ("n[0-1]", "n1,n0", "a[3,5-6]b[1-2]", "gpu-[007-009,12],login"):
        done, _ = told(environment, "scontrol", "show", "hostnames", nodes)
        assert slurm.first_host(nodes) == done.stdout.split()[0]


def test_a_batch_script_of_several_tasks_is_told_to_use_srun(environment, recipe_file, tiny, tmp_path):
    command = f"{sys.executable} -m hlat train {recipe_file} {' '.join(tiny)}"
    words = ["sbatch", "-W", "-N2", "-n2", f"--output={tmp_path}/said", f"--wrap={command}"]
    done, _ = told(environment, *words)
    said = (tmp_path / "said").read_text()
    assert re.search(r"which has 2 tasks: only `srun hlat train RECIPE`", said), said
    assert done.returncode == 2 and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_srun_trains_one_run_and_a_signal_queues_it_again(environment, recipe_file, tiny, tmp_path):
    train = [sys.executable, "-m", "hlat", "train", recipe_file, *tiny, "training.steps=6", "checkpoint.every_steps=3"]
    done, _ = told(environment, "srun", "-N2", "-n2", *map(str, train))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/logs/rank-00001.log").exists()
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step-00000003", "step-00000006"]
    assert done.stdout.count("finished at step 6") == 1
    assert not list((tmp_path / "run").glob(".secret*"))
