"""Batch scripts in a real Slurm: options, words, variables, exit codes, queueing again, chains, a run that goes on."""

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from itertools import pairwise

import psutil
import pytest

from hlat.launch.schedulers.slurm import newest_job
from tests.support.commands import hlat
from tests.support.launch.slurm_cluster import (
    cluster,
    job_fields,
    kill_machine,
    missing,
    start_machine,
    start_now,
    wait_for_state,
)
from tests.support.same_runs import assert_same_run, events_of

# Stands for hlat: writes down how it was called, and ends with the exit code of its rank, or on SIGUSR1 with 75.
STUB = """
import json, os, signal, sys, time
folder = os.environ["STUB_FOLDER"]
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
record = {"words": sys.argv[1:], "environment": dict(os.environ), "time": time.time()}
rank = int(os.environ["SLURM_PROCID"])
name = f"{os.environ['SLURM_JOB_ID']}-{rank}-{os.environ.get('SLURM_RESTART_COUNT', 0)}"
with open(f"{folder}/.{name}", "w") as file:
    json.dump(record, file)
os.replace(file.name, f"{folder}/{name}")  # a record is there whole
codes = os.environ["STUB_CODES"].split(",")
if codes[0] == "wait":
    time.sleep(600)
sys.exit(int(codes[rank % len(codes)]))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Environment of a Slurm cluster with two machines."""
    if missing():
        pytest.skip(missing())
    with cluster(tmp_path_factory.mktemp("slurm"), 2) as found:
        yield found


@pytest.fixture
def launch(environment, recipe_file, tmp_path):
    """Submit a run of the stub, or another program; return its job."""
    stub, folder = tmp_path / "stub.py", tmp_path / "it's a folder"
    stub.write_text(STUB)
    folder.mkdir()

    def start(*words, codes="0", program=f"{sys.executable} {stub}", cwd=folder, nodes=2):
        done = hlat(
            *("launch", "slurm", recipe_file, f"run.dir={tmp_path / 'run'}", f"data.path={tmp_path}", *words),
            *("--nodes", str(nodes), "--program", program),
            *("--env", f"STUB_FOLDER={tmp_path}", "--env", f"STUB_CODES={codes}"),
            env=environment,
            cwd=cwd,
        )
        assert done.returncode == 0, done.stderr
        return int(re.match(r"job (\d+)", done.stdout)[1])

    return start


def records(folder, job):
    """Records that the stub wrote for a job, by file name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob(f"{job}-*"))}


def test_words_variables_and_options_arrive_unchanged(launch, environment, tmp_path):
    value = """a  b'c"d\\e $HOME `ls` # ; & *"""
    override = f"run.name=x{value}"[:10]
    job = launch(override, "--env", f"VALUE={value}", "--sbatch", f"--comment={value}", "--name", value, "--time", "10")
    assert wait_for_state(environment, job, "COMPLETED", "FAILED")["ExitCode"] == "0:0"
    found = records(tmp_path, job)
    assert list(found) == [f"{job}-0-0", f"{job}-1-0"]
    for rank, record in enumerate(found.values()):
        assert record["words"][0] == "train" and override in record["words"]
        seen = record["environment"]
        assert (
            seen["VALUE"] == value
            and seen["SLURM_PROCID"] == str(rank)
            and seen["HLAT_ADDRESSES"] == "n0=127.0.0.1 n1=127.0.0.1 "
        )
        assert seen["PWD"] == str(tmp_path / "it's a folder")
        end = subprocess.run(
            ["date", "-d", job_fields(environment, job)["StartTime"], "+%s"], capture_output=True, check=True
        )
        assert int(seen["SLURM_JOB_END_TIME"]) == int(end.stdout) + 600, "the start, and ten minutes"
    printed = subprocess.run(
        ["scontrol", "show", "job", str(job), "-o"], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert f" JobName={value} " in printed and f" Comment={value} " in printed


def test_the_output_is_where_it_was_asked_for_in_a_folder_that_was_not_there(launch, environment, tmp_path):
    """Slurm makes no folder, and replaces %j in the names of all of them, the working folder's included."""
    folder = tmp_path / "90 %j"
    folder.mkdir()
    job = launch("--to", "logs/%x-%j.log", "--name", "a/b", cwd=folder)
    assert wait_for_state(environment, job, "COMPLETED", "FAILED")["ExitCode"] == "0:0"
    assert f"job {job}, start 1" in (folder / "logs" / "a" / f"b-{job}.log").read_text()


def test_a_node_has_one_task_with_the_cores_and_memory_asked_for(launch, environment, tmp_path):
    """The cluster has DefMemPerCPU=10, and 1000 MB on each of two nodes: --exclusive alone gives a part of it."""
    words = ("--nproc", "2", "batch.global_batch=8", "batch.micro_batch=1")
    expected = {("exclusive",): "2000M", ("exclusive", "mem=300"): "600M"}
    jobs = {given: launch(*words, *(word for text in given for word in ("--set", text))) for given in expected}
    for given, job in jobs.items():
        fields = wait_for_state(environment, job, "COMPLETED", "FAILED")
        assert fields["ExitCode"] == "0:0" and f",mem={expected[given]}," in fields["TRES"], given
        found = records(tmp_path, job)
        assert list(found) == [f"{job}-0-0", f"{job}-1-0"]
        for record in found.values():
            seen = record["environment"]
            assert seen["SLURM_NTASKS_PER_NODE"] == "1" and int(seen["SLURM_CPUS_ON_NODE"]) >= 2


def test_the_script_ends_with_the_exit_code_of_the_run(launch, environment):
    expected = {"2,1": 2, "3": 3, "1,4": 4, "0,5": 5}
    jobs = {codes: launch(codes=codes) for codes in expected}  # they wait in the queue together
    for codes, job in jobs.items():
        fields = wait_for_state(environment, job, "FAILED", "COMPLETED")
        assert (fields["ExitCode"], fields["Restarts"]) == (f"{expected[codes]}:0", "0"), codes


@pytest.mark.slow
def test_a_saved_run_is_queued_again_without_the_administrator(launch, environment, tmp_path):
    job = launch(codes="75")
    while len(records(tmp_path, job)) != 2:
        time.sleep(0.1)
    assert wait_for_state(environment, job, "PENDING")["Restarts"] == "1"
    start_now(environment, job)
    while f"{job}-1-1" not in records(tmp_path, job):
        time.sleep(0.1)
    subprocess.run(["scancel", str(job)], env=environment, check=True)
    output = tmp_path / "it's a folder" / f"tiny-{job}.log"
    assert "start 1" in output.read_text() and "start 2" in output.read_text(), "the output of both starts"


@pytest.mark.slow
def test_a_cancelled_job_is_not_queued_again(launch, environment, tmp_path):
    job = launch(codes="wait")
    while len(records(tmp_path, job)) != 2:
        time.sleep(0.1)
    done = hlat("launch", "cancel", tmp_path / "run", env=environment)
    assert done.stdout == f"cancelled job {job}\n"
    assert wait_for_state(environment, job, "CANCELLED")["Restarts"] == "0"


@pytest.mark.slow
def test_a_chain_goes_on_after_75(launch, environment):
    job = launch("--chain", "4", codes="75")
    first = wait_for_state(environment, f"{job}_1", "FAILED")
    assert (first["ExitCode"], first["Restarts"]) == ("75:0", "0")
    wait_for_state(environment, f"{job}_4", "FAILED")
    ended = [job_fields(environment, f"{job}_{element}") for element in range(1, 5)]
    assert all(before["EndTime"] <= after["StartTime"] for before, after in pairwise(ended))


@pytest.mark.parametrize("codes", ["0", "2", "4"])
@pytest.mark.slow
def test_a_chain_ends_with_its_run(launch, environment, tmp_path, codes):
    job = launch("--chain", "3", codes=codes)
    assert wait_for_state(environment, f"{job}_1", "COMPLETED", "FAILED")["ExitCode"] == f"{codes}:0"
    for line in hlat("launch", "status", tmp_path / "run", env=environment).stdout.splitlines()[::2]:
        assert line.startswith(f"job {job}_1: ") or line.startswith(f"job {job}: CANCELLED"), line


@pytest.mark.slow
def test_excluded_nodes_are_not_used(launch, environment):
    for node, other in (("n0", "n1"), ("n1", "n0")):
        fields = wait_for_state(environment, launch("--exclude", node, nodes=1), "COMPLETED")
        assert fields["NodeList"] == other


@pytest.mark.slow
def test_status_and_logs_of_the_newest_job(launch, environment, tmp_path):
    launch()
    job = launch("--name", "second")
    wait_for_state(environment, job, "COMPLETED")
    status = hlat("launch", "status", tmp_path / "run", env=environment)
    assert f"job {job}: COMPLETED (None), exit code 0:0, restarts 0" in status.stdout
    assert f"output {tmp_path / chr(39).join(['it', 's a folder'])}/second-{job}.log" in status.stdout
    logs = hlat("launch", "logs", tmp_path / "run", env=environment)
    assert re.fullmatch(rf"job {job}, start 1, nodes n\[0-1\]\n", logs.stdout)


@pytest.mark.slow  # Slurm looks at time limits twice a minute
def test_the_signal_comes_before_the_time_limit(launch, environment, tmp_path):
    job = launch("--time", "2", "--grace", "70", codes="wait")
    while len(records(tmp_path, job)) != 2:
        time.sleep(0.1)
    end = float(records(tmp_path, job)[f"{job}-0-0"]["environment"]["SLURM_JOB_END_TIME"])
    fields = wait_for_state(environment, job, "PENDING", bound=120)
    assert fields["Restarts"] == "1" and time.time() < end, "it was queued again before its time was over"
    subprocess.run(["scancel", str(job)], env=environment, check=True)


PROGRAM = shlex.join([sys.executable, "-m", "hlat"])
STEPS = ("training.steps=60", "checkpoint.every_steps=25", "training.log_every=1")


def undisturbed(environment, recipe_file, words, run):
    """Train in two processes of this machine, without Slurm."""
    done = hlat("train", recipe_file, *words, f"run.dir={run}", "--nproc", "2", env={**environment, **_ONE_THREAD})
    assert done.returncode == 0, done.stderr


def signalled(environment, job):
    subprocess.run(["scancel", "--signal=USR1", str(job)], env=environment, check=True)


def requeued(environment, job):
    subprocess.run(["scontrol", "requeue", str(job)], env=environment, check=True)


def node_down(environment, job):
    """Set a node of the job down, as Slurm does with one that does not answer; it comes back later."""
    subprocess.run(["scontrol", "update", "nodename=n1", "state=DOWN", "reason=test"], env=environment, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", [signalled, requeued, node_down])
def test_a_run_on_two_nodes_goes_on_with_the_same_bits(launch, environment, recipe_file, tiny, tmp_path, interrupt):
    words = [*tiny, *STEPS]
    undisturbed(environment, recipe_file, words, tmp_path / "plain")
    job = launch(*words, "--env", "OMP_NUM_THREADS=1", program=PROGRAM)
    _wait_for_step(tmp_path / "run", 5)
    interrupt(environment, job)
    assert wait_for_state(environment, job, "PENDING", bound=120)["Restarts"] == "1"
    stopped = _steps(tmp_path / "run")
    assert 5 <= stopped[-1] < 60
    subprocess.run(["scontrol", "update", "nodename=n1", "state=RESUME"], env=environment, check=False)
    start_now(environment, job)
    assert wait_for_state(environment, job, "COMPLETED", "FAILED", bound=300)["ExitCode"] == "0:0"
    assert_same_run(tmp_path / "run", tmp_path / "plain")


@pytest.mark.slow
def test_a_rank_that_dies_is_restarted_within_the_job(launch, environment, recipe_file, tiny, tmp_path):
    words = [*tiny, *STEPS]
    undisturbed(environment, recipe_file, words, tmp_path / "plain")
    job = launch(*words, "--env", "OMP_NUM_THREADS=1", program=PROGRAM)
    _wait_for_step(tmp_path / "run", 5)
    mark = f"run.dir={tmp_path / 'run'}"
    ranks = [
        process
        for process in psutil.process_iter()
        if mark in _words(process) and _variable(process, "RANK") == "1" and "--nproc" not in _words(process)
    ]
    for process in ranks:
        process.kill()
    assert wait_for_state(environment, job, "COMPLETED", "FAILED", bound=300)["Restarts"] == "0"
    [incident] = events_of(tmp_path / "run", "incident")
    assert (incident["kind"], incident["rank"], incident["host"]) == ("signal", 1, "n1")
    assert_same_run(tmp_path / "run", tmp_path / "plain")


@pytest.mark.slow
def test_a_job_that_loses_a_machine_goes_on_with_the_other(launch, environment, recipe_file, tiny, tmp_path):
    """Every step is logged once; with one replica less sums have another order, so that bits may differ."""
    words = [*tiny, *STEPS, "training.steps=120", "recovery.hang_seconds=20"]
    undisturbed(environment, recipe_file, words, tmp_path / "plain")
    job = launch(*words, "--env", "OMP_NUM_THREADS=1", program=PROGRAM, nodes="1:2")
    _wait_for_step(tmp_path / "run", 5)
    kill_machine(environment, "n1")
    try:
        fields = wait_for_state(environment, job, "COMPLETED", "FAILED", "NODE_FAIL", "PENDING", bound=400)
    finally:
        start_machine(environment, "n1")
    assert (fields["JobState"], fields["ExitCode"], fields["Restarts"]) == ("COMPLETED", "0:0", "0")
    [incident] = events_of(tmp_path / "run", "incident")
    assert (incident["kind"], incident["host"]) == ("host", "n1")
    assert [event["world"] for event in events_of(tmp_path / "run", "hosts")] == [2, 1]
    assert _steps(tmp_path / "run") == _steps(tmp_path / "plain")


@pytest.mark.slow
def test_a_chain_of_jobs_under_a_time_limit_ends_a_run(launch, environment, recipe_file, tiny, tmp_path):
    """Each job saves a minute before its end, after about 40 s of training; the run needs about 100 s."""
    pilot = [*tiny, "training.steps=60", "training.log_every=20"]
    undisturbed(environment, recipe_file, pilot, tmp_path / "pilot")
    lines = [json.loads(line) for line in (tmp_path / "pilot" / "metrics.jsonl").read_text().splitlines()]
    tokens = lines[-1]["tokens"] / lines[-1]["step"]
    steps = int(100 * lines[-1]["tokens_per_second"] / tokens)
    words = [*tiny, f"training.steps={steps}", "training.log_every=20", f"checkpoint.every_steps={steps}"]
    undisturbed(environment, recipe_file, words, tmp_path / "plain")
    options = ("--chain", "6", "--time", "2", "--grace", "60", "--env", "OMP_NUM_THREADS=1")
    job = launch(*words, *options, program=PROGRAM)
    wait_for_state(environment, f"{job}_3", "COMPLETED", "FAILED", bound=600)
    last = 3
    while job_fields(environment, f"{job}_{last}")["ExitCode"] == "75:0":
        last += 1
        wait_for_state(environment, f"{job}_{last}", "COMPLETED", "FAILED", bound=200)
    assert job_fields(environment, f"{job}_{last}")["ExitCode"] == "0:0"
    assert job_fields(environment, f"{job}_1")["ExitCode"] == "75:0"
    assert_same_run(tmp_path / "run", tmp_path / "plain")


def _words(process):
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def _variable(process, name):
    with contextlib.suppress(psutil.Error):
        return process.environ().get(name)
    return None


_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def _steps(run):
    file = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def _wait_for_step(run, step):
    deadline = time.monotonic() + 300
    while not _steps(run) or _steps(run)[-1] < step:
        assert time.monotonic() < deadline, "the run does not begin"
        time.sleep(0.05)


# Stands for hlat with a doctor that finds the node in STUB_BAD.
DOCTOR = """
import json, os, sys, time
verb, node, folder = sys.argv[1], os.environ["SLURMD_NODENAME"], os.environ["STUB_FOLDER"]
name = f"{os.environ['SLURM_JOB_ID']}-{verb}-{node}"
with open(f"{folder}/.{name}", "w") as file:
    json.dump({"words": sys.argv[1:], "nodes": os.environ["SLURM_STEP_NODELIST"]}, file)
os.replace(file.name, f"{folder}/{name}")  # a record is there whole
if verb == "doctor":
    bad = os.environ["STUB_BAD"]
    if os.environ["SLURM_NODEID"] == "0":
        with open(sys.argv[sys.argv.index("--exclude-bad") + 1], "w") as file:
            file.write(bad + "\\n" if bad in ("n0", "n1") else "")
    sys.exit(7 if bad == "all" else 0)
"""


@pytest.fixture
def examined(launch, tmp_path):
    """Submit a run whose nodes are examined first; return its job."""
    doctor = tmp_path / "doctor.py"
    doctor.write_text(DOCTOR)

    def start(bad, *more, nodes="2"):
        return launch("--doctor", "--env", f"STUB_BAD={bad}", *more, program=f"{sys.executable} {doctor}", nodes=nodes)

    return start


def test_nodes_are_examined_before_the_training(examined, environment, tmp_path):
    job = examined("none")
    assert wait_for_state(environment, job, "COMPLETED", "FAILED")["ExitCode"] == "0:0"
    assert sorted(records(tmp_path, job)) == [f"{job}-{verb}-{node}" for verb in ("doctor", "train") for node in NODES]
    words = records(tmp_path, job)[f"{job}-train-n0"]["words"]
    assert words[-4:] == ["--nproc", "1", "--nodes", "2"]


def test_a_bad_node_is_left_out_where_fewer_are_enough(examined, environment, tmp_path):
    job = examined("n0", nodes="1:2")
    assert wait_for_state(environment, job, "COMPLETED", "FAILED")["ExitCode"] == "0:0"
    trained = [name for name in records(tmp_path, job) if "-train-" in name]
    assert trained == [f"{job}-train-n1"]
    assert records(tmp_path, job)[trained[0]]["words"][-2:] == ["--nodes", "1:1"]


def test_a_failure_of_the_doctor_that_no_node_is_to_blame_for_ends_the_job(examined, environment, tmp_path):
    job = examined("all")
    assert wait_for_state(environment, job, "COMPLETED", "FAILED")["ExitCode"] == "7:0"
    assert not [name for name in records(tmp_path, job) if "-train-" in name]


def test_a_bad_node_is_drained_and_the_job_queued_again_where_all_are_needed(examined, environment, tmp_path):
    job = examined("n1")
    try:
        while len(records(tmp_path, job)) != 2:
            time.sleep(0.1)
        assert wait_for_state(environment, job, "PENDING", bound=60)["Restarts"] == "1"
        state = subprocess.run(
            ["sinfo", "-h", "-n", "n1", "-o", "%T %E"], env=environment, capture_output=True, text=True, check=True
        )
        assert state.stdout.startswith("drain") and "hlat doctor" in state.stdout
        assert not [name for name in records(tmp_path, job) if "-train-" in name]
    finally:
        subprocess.run(["scancel", str(job)], env=environment, check=True)
        subprocess.run(["scontrol", "update", "nodename=n1", "state=RESUME"], env=environment, check=False)


@pytest.mark.parametrize("chain", [(), pytest.param(("--chain", "3"), marks=pytest.mark.slow)])
def test_a_user_who_may_not_drain_has_the_job_submitted_without_the_bad_node(examined, environment, tmp_path, chain):
    """It is the job that `hlat launch` knows from then on; the nodes that were excluded before stay excluded."""
    folder = tmp_path / "bin"
    folder.mkdir()
    real = shutil.which("scontrol")
    stubs = {
        "scontrol": f'[ "$1" != update ] && exec {real} "$@" | sed "s/ExcNodeList=(null)/ExcNodeList=n7/"',
        "sbatch": f'echo "$@" >> {tmp_path}/submitted; echo 4711',
    }
    for name, text in stubs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    job = examined("n1", *chain, "--setup", f"PATH={folder}:$PATH")
    element = f"{job}_1" if chain else job
    assert wait_for_state(environment, element, "COMPLETED", "FAILED", bound=60)["ExitCode"] == "0:0"
    words = (tmp_path / "submitted").read_text().split()
    assert words[:2] == ["--parsable", "--exclude=n7,n1"]
    assert newest_job(tmp_path / "run") == 4711
    # What is left of the first chain would train beside the second.
    waiting = ["squeue", "-h", "-j", str(job), "-t", "PENDING"]
    assert subprocess.run(waiting, env=environment, capture_output=True, check=False).stdout == b""


NODES = ("n0", "n1")
