"""A real Slurm: its tasks are the ranks of one run, and missing values are queried from its commands."""

import json
import re
import subprocess
import sys
from datetime import datetime

import pytest

from hlat.runtime import slurm
from tests.support.launch.slurm_cluster import cluster, missing

_PROGRAM = """
import json, os
from hlat.runtime import slurm
print(json.dumps({"found": slurm.rank_variables(), "end": slurm.job_end_time()}))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Environment of a Slurm cluster with two machines."""
    if missing():
        pytest.skip(missing())
    with cluster(tmp_path_factory.mktemp("slurm"), 2) as found:
        yield found


def run_json(environment, *command):
    """Run a command; return it and the JSON lines that its processes printed."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    return done, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_tasks_of_a_step_are_ranks_of_one_run(environment):
    done, printed = run_json(environment, "srun", "-N2", "-n2", "--time=7", sys.executable, "-c", _PROGRAM)
    assert done.returncode == 0, done.stderr
    found = sorted((variables["found"] for variables in printed), key=lambda variables: variables["RANK"])
    assert [(variables["RANK"], variables["GROUP_RANK"], variables["LOCAL_RANK"]) for variables in found] == [
        ("0", "0", "0"),
        ("1", "1", "0"),
    ]
    assert {(variables["WORLD_SIZE"], variables["MASTER_ADDR"]) for variables in found} == {
        ("2", "127.0.0.1")
    }  # the name n0 cannot be resolved here
    assert len({variables["MASTER_PORT"] for variables in found}) == 1


def test_the_job_end_equals_that_of_squeue(environment):
    script = f"squeue -h -j $SLURM_JOB_ID -o %e; unset SLURM_JOB_END_TIME; exec {sys.executable} -c '{_PROGRAM}'"
    done, printed = run_json(environment, "srun", "-n1", "--time=7", "bash", "-c", script)
    assert done.returncode == 0, done.stderr
    assert printed[0]["end"] == datetime.fromisoformat(done.stdout.splitlines()[0]).timestamp()
    assert printed[0]["found"] == {}, "a single task is a single process"


def test_the_first_host_equals_that_of_scontrol(environment):
    for nodes in ("n[0-1]", "n1,n0", "a[3,5-6]b[1-2]", "gpu-[007-009,12],login"):
        done, _ = run_json(environment, "scontrol", "show", "hostnames", nodes)
        assert slurm.first_host(nodes) == done.stdout.split()[0]


def test_a_batch_script_of_several_tasks_gets_an_error_that_names_srun(environment, recipe_file, tiny, tmp_path):
    command = f"{sys.executable} -m hlat train {recipe_file} {' '.join(tiny)}"
    words = ["sbatch", "-W", "-N2", "-n2", f"--output={tmp_path}/printed", f"--wrap={command}"]
    done, _ = run_json(environment, *words)
    printed = (tmp_path / "printed").read_text()
    assert re.search(r"which has 2 tasks: only `srun hlat train RECIPE`", printed), printed
    assert done.returncode == 2 and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_srun_trains_one_run(environment, recipe_file, tiny, tmp_path):
    train = [sys.executable, "-m", "hlat", "train", recipe_file, *tiny, "training.steps=6", "checkpoint.every_steps=3"]
    done, _ = run_json(environment, "srun", "-N2", "-n2", *map(str, train))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/logs/rank-00001.log").exists()
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step-00000003", "step-00000006"]
    assert done.stdout.count("finished at step 6") == 1
    assert not list((tmp_path / "run").glob(".secret*"))
