"""What Slurm's variables say of a process, as `srun`, `sbatch` and `salloc` of 22.05 set them."""

import pytest

from hlat.runtime import LaunchError, RankInfo, rank_info, slurm

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


def nobody(command):
    """Slurm's commands, where there are none."""
    return ""


def test_a_task_of_several_is_a_process_of_one_run():
    found = slurm.rank_variables(TASK, nobody)
    assert rank_info({**TASK, **found}) == RankInfo(rank=5, world=8, local_rank=1, node=2)
    assert found["MASTER_ADDR"] == "localhost"
    others = [slurm.rank_variables({**TASK, "SLURM_PROCID": str(rank)}, nobody) for rank in range(8)]
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in others} == {("localhost", found["MASTER_PORT"])}
    assert [one["RANK"] for one in others] == [str(rank) for rank in range(8)]


def test_every_step_has_a_port_of_its_own():
    """Jobs that follow each other, and their steps: a machine may have several at a time."""
    ports = {
        slurm.rank_variables({**TASK, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}, nobody)["MASTER_PORT"]
        for job in range(100, 200)
        for step in range(31)
    }
    assert len(ports) == 100 * 31 and all(1024 < int(port) < 32768 for port in ports)


def test_what_the_user_has_set_is_left():
    assert slurm.rank_variables({**TASK, "WORLD_SIZE": "2"}, nobody) == {}
    found = slurm.rank_variables({**TASK, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4321"}, nobody)
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
def test_one_task_is_one_process(environment):
    assert slurm.rank_variables(environment, nobody) == {}


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
def test_the_script_of_several_tasks_is_told_to_use_srun(environment):
    with pytest.raises(LaunchError, match=r"job 812, which has (8 tasks|2 machines).*srun hlat train.*--nproc 1"):
        slurm.rank_variables(environment, nobody)


@pytest.mark.parametrize(
    ("gone", "named"),
    [
        (["SLURM_LOCALID"], "SLURM_LOCALID"),
        (["SLURM_NODEID"], "SLURM_NODEID"),
        (["SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"], "SLURM_STEP_NUM_TASKS or SLURM_NTASKS"),
        (["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"], "SLURM_JOB_NODELIST"),
    ],
)
def test_a_task_that_slurm_does_not_describe_is_refused(gone, named):
    environment = {name: value for name, value in TASK.items() if name not in gone}
    with pytest.raises(LaunchError, match=rf"{named}.*Set RANK, WORLD_SIZE"):
        slurm.rank_variables(environment, nobody)


def test_a_heterogeneous_job_is_refused():
    with pytest.raises(LaunchError, match="heterogeneous"):
        slurm.rank_variables({**TASK, "SLURM_HET_SIZE": "2"}, nobody)


def test_a_host_whose_name_means_nothing_is_asked_for():
    asked = []

    def ask(command):
        asked.append(command)
        return "NodeName=n0.invalid Arch=x86_64 NodeAddr=10.1.2.3 NodeHostName=box Version=22.05.8"

    found = slurm.rank_variables({**TASK, "SLURM_STEP_NODELIST": "n0.invalid,n1"}, ask)
    assert found["MASTER_ADDR"] == "10.1.2.3" and asked == [["scontrol", "show", "node", "n0.invalid", "-o"]]


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
def test_the_first_host_of_a_list(nodes, first):
    assert slurm.first_host(nodes) == first


def test_the_end_of_a_job_is_asked_for_where_it_is_not_said(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    answers = {"squeue": "2026-11-22T18:04:03\n", "scontrol": ""}
    asked = []

    def ask(command):
        asked.append(command[0])
        return answers[command[0]]

    import time  # noqa: PLC0415

    time.tzset()
    try:
        seconds = slurm.job_end_time({"SLURM_JOB_ID": "812"}, ask)
        assert seconds == 1795370643  # date -u -d 2026-11-22T18:04:03 +%s
        assert asked == ["squeue"]
        answers.update(squeue="", scontrol="JobId=812 StartTime=2026-11-22T17:00:00 EndTime=2026-11-22T18:04:03 X=1")
        assert slurm.job_end_time({"SLURM_JOB_ID": "812"}, ask) == seconds
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("said", ["", "N/A", "Unknown", "NONE", "slurm_load_jobs error"])
def test_no_end_is_known_where_slurm_says_none(said):
    assert slurm.job_end_time({"SLURM_JOB_ID": "812"}, lambda command: said) is None


def test_slurm_is_not_asked_outside_a_job_nor_by_every_rank():
    def refuse(command):
        raise AssertionError(command)

    assert slurm.job_end_time({}, refuse) is None
    assert slurm.job_end_time({"SLURM_JOB_ID": "812", "RANK": "1"}, refuse) is None
    assert slurm.job_end_time({"SLURM_JOB_ID": "812", "SLURM_JOB_END_TIME": "12.5"}, refuse) == 12.5
