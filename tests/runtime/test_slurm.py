"""Rank variables and job end time from Slurm's environment, as `srun`, `sbatch` and `salloc` of 22.05 set it."""

import pytest

from hlat.runtime import slurm
from hlat.runtime.errors import LaunchError
from hlat.runtime.process import RankInfo, rank_info

TASK = {
    "SLURM_JOB_ID": "812",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_JOB_NODELIST": "other[1-9]",
}
SCRIPT = {"SLURM_JOB_ID": "812", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


def no_commands(command):
    """Stand-in for Slurm's commands on a machine without Slurm."""
    return ""


def test_tasks_of_a_step_are_ranks_of_one_run():
    found = slurm.rank_variables(TASK, no_commands)
    assert rank_info({**TASK, **found}) == RankInfo(rank=5, world=8, local_rank=1, node=2)
    assert found["MASTER_ADDR"] == "localhost"
    variables_by_rank = [slurm.rank_variables({**TASK, "SLURM_PROCID": str(rank)}, no_commands) for rank in range(8)]
    assert {(variables["MASTER_ADDR"], variables["MASTER_PORT"]) for variables in variables_by_rank} == {
        ("localhost", found["MASTER_PORT"])
    }
    assert [variables["RANK"] for variables in variables_by_rank] == [str(rank) for rank in range(8)]


def test_every_step_has_its_own_port():
    """Consecutive jobs and their steps get different ports, because a machine may run several at once."""
    ports = {
        slurm.rank_variables({**TASK, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}, no_commands)["MASTER_PORT"]
        for job in range(100, 200)
        for step in range(31)
    }
    assert len(ports) == 100 * 31 and all(1024 < int(port) < 32768 for port in ports)


def test_variables_set_by_the_user_are_kept():
    assert slurm.rank_variables({**TASK, "WORLD_SIZE": "2"}, no_commands) == {}
    found = slurm.rank_variables({**TASK, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4321"}, no_commands)
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "4321")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**TASK, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"},
        SCRIPT,
        {**SCRIPT, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"},
        {"SLURM_JOB_ID": "812", "SLURM_NTASKS": "1"},
    ],
    ids=["no job", "a step of one task", "a script", "a script of one task", "salloc"],
)
def test_a_single_task_is_a_single_process(environment):
    assert slurm.rank_variables(environment, no_commands) == {}


@pytest.mark.parametrize(
    "environment",
    [
        {**SCRIPT, "SLURM_NTASKS": "8"},
        {**SCRIPT, "SLURM_JOB_NUM_NODES": "2"},
        {"SLURM_JOB_ID": "812", "SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "2"},
        {**SCRIPT, "SLURM_STEP_ID": "4294967291", "SLURM_NTASKS": "8"},
        {**SCRIPT, "SLURM_STEP_ID": "4294967290", "SLURM_JOB_NUM_NODES": "2"},
    ],
    ids=["script", "script of two machines", "salloc", "script as a step", "interactive step"],
)
def test_the_script_of_several_tasks_gets_an_error_that_names_srun(environment):
    with pytest.raises(LaunchError, match=r"job 812, which has (8 tasks|2 machines).*srun hlat train.*--nproc 1"):
        slurm.rank_variables(environment, no_commands)


@pytest.mark.parametrize(
    ("gone", "named"),
    [
        (["SLURM_LOCALID"], "SLURM_LOCALID"),
        (["SLURM_NODEID"], "SLURM_NODEID"),
        (["SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"], "SLURM_STEP_NUM_TASKS or SLURM_NTASKS"),
        (["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"], "SLURM_JOB_NODELIST"),
    ],
)
def test_a_task_with_missing_variables_is_refused(gone, named):
    environment = {name: value for name, value in TASK.items() if name not in gone}
    with pytest.raises(LaunchError, match=rf"{named}.*Set RANK, WORLD_SIZE"):
        slurm.rank_variables(environment, no_commands)


def test_a_heterogeneous_job_is_refused():
    with pytest.raises(LaunchError, match="heterogeneous"):
        slurm.rank_variables({**TASK, "SLURM_HET_SIZE": "2"}, no_commands)


def test_the_address_of_an_unresolvable_host_comes_from_scontrol():
    commands = []

    def ask(command):
        commands.append(command)
        return "NodeName=n0.invalid Arch=x86_64 NodeAddr=10.1.2.3 NodeHostName=box Version=22.05.8"

    found = slurm.rank_variables({**TASK, "SLURM_STEP_NODELIST": "n0.invalid,n1"}, ask)
    assert found["MASTER_ADDR"] == "10.1.2.3" and commands == [["scontrol", "show", "node", "n0.invalid", "-o"]]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n0", "n0"),
        ("n0,n1", "n0"),
        ("n[0-1]", "n0"),
        ("gpu-[007-009,12],login", "gpu-007"),
        ("a[3,5-6]b[1-2]", "a3b1"),
        ("rack1-n4,rack[2-3]-n[0-9]", "rack1-n4"),
    ],
)
def test_the_first_host_of_a_host_list(nodes, first):
    assert slurm.first_host(nodes) == first


def test_the_job_end_is_queried_if_the_environment_lacks_it(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    answers = {"squeue": "2026-11-22T18:04:03\n", "scontrol": ""}
    commands = []

    def ask(command):
        commands.append(command[0])
        return answers[command[0]]

    import time  # noqa: PLC0415

    time.tzset()
    try:
        seconds = slurm.job_end_time({"SLURM_JOB_ID": "812"}, ask)
        assert seconds == 1795370643  # date -u -d 2026-11-22T18:04:03 +%s
        assert commands == ["squeue"]
        answers.update(squeue="", scontrol="JobId=812 StartTime=2026-11-22T17:00:00 EndTime=2026-11-22T18:04:03 X=1")
        assert slurm.job_end_time({"SLURM_JOB_ID": "812"}, ask) == seconds
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("output", ["", "N/A", "Unknown", "NONE", "slurm_load_jobs error"])
def test_a_job_without_a_time_limit_has_no_end(output):
    assert slurm.job_end_time({"SLURM_JOB_ID": "812"}, lambda command: output) is None


def test_slurm_is_queried_only_in_a_job_and_only_by_rank_0():
    def refuse(command):
        raise AssertionError(command)

    assert slurm.job_end_time({}, refuse) is None
    assert slurm.job_end_time({"SLURM_JOB_ID": "812", "RANK": "1"}, refuse) is None
    assert slurm.job_end_time({"SLURM_JOB_ID": "812", "SLURM_JOB_END_TIME": "12.5"}, refuse) == 12.5
