"""Real runs on several hosts are bit for bit the run of one machine with the same layout."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launch import net_hosts as simulated
from tests.support.launch.launching import wait_until
from tests.support.launch.net_hosts import NetHosts, net_hosts
from tests.support.same_runs import assert_same_run, events_of

_SHIFTED_CLOCK = Path(simulated.__file__).with_name("shifted_clock.c")
RECIPE = """
run: {{name: r, dir: {folder}/NAME, device: cpu}}
model: {{vocab_size: 320, layers: 2, hidden_size: 32, intermediate_size: 96, heads: 4}}
data: {{path: {folder}/text.txt, prepared_dir: {folder}/data, sequence_length: 32,
       tokenizer: {{train: bpe, vocab_size: 320}}, validation: {{by: tail, fraction: 0.1}}}}
batch: {{global_batch: 8, micro_batch: 2}}
parallel: {{tensor: 2}}
training: {{steps: 60, log_every: 1}}
evaluation: {{every_steps: 10}}
checkpoint: {{every_steps: 5}}
recovery: {{hang_seconds: 20, backoff_seconds: 0.1}}
tracking: {{console: plain, tensorboard: false}}
"""


@pytest.fixture
def recipe(tmp_path):
    """Recipe file; ``run.dir`` is to be given."""
    text = "".join(f"{number} is a number, and its square is {number * number}.\n" for number in range(4000))
    (tmp_path / "text.txt").write_text(text)
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.format(folder=tmp_path))
    return file


def command(recipe: Path, name: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "hlat", "train", str(recipe), f"run.dir={recipe.parent / name}", *options]


def undisturbed(recipe: Path) -> Path:
    """The run of four processes of one machine."""
    subprocess.run(command(recipe, "one", "--nproc", "4"), check=True)
    return recipe.parent / "one"


@pytest.mark.slow
def test_a_rehearsal_of_two_hosts_on_this_machine_has_the_bits_of_one(recipe):
    words = [sys.executable, "-m", "hlat", "launch", "local", str(recipe), f"run.dir={recipe.parent / 'two'}"]
    done = subprocess.run([*words, "--nodes", "2", "--nproc", "2"], capture_output=True, text=True, check=True)
    assert "host 0: finished at step 60" in done.stdout
    assert_same_run(undisturbed(recipe), recipe.parent / "two")


def start(hosts: NetHosts, recipe: Path, node: int, *overrides: str) -> "subprocess.Popen[str]":
    """Start the supervisor of a simulated host, with two ranks."""
    words = command(recipe, "two", *overrides, "--nproc", "2", "--nodes", "2", "--node", str(node))
    return hosts.start(f"h{node}", *words, "--address", hosts.address(node))


def kill_host(hosts: NetHosts, host: str) -> None:
    for pid in hosts.pids(host):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def logged_steps(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.fixture
def hosts(tmp_path):
    """Two simulated hosts."""
    if reason := simulated.missing():
        pytest.skip(reason)
    with net_hosts(tmp_path / "net", 2) as found:
        yield found


def finish(*processes: "subprocess.Popen[str]") -> list[int]:
    codes = [process.wait(180) for process in processes]
    for process in processes:
        process.stdout.close()
    return codes


@pytest.mark.slow
def test_clocks_that_differ_by_two_hours_change_nothing(recipe, hosts, tmp_path):
    """The host that is ahead is killed, and comes back; all of its processes see another time of day."""
    compiler = shutil.which("cc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C compiler: apt-get install g++")
    library = tmp_path / "shifted_clock.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-x", "c", str(_SHIFTED_CLOCK), "-o", str(library)], check=True
    )
    hosts.setup("h1", f"export LD_PRELOAD={library}", "export SHIFTED_CLOCK=7200")
    ahead = subprocess.run([str(hosts.transport), "h1", "date", "+%s"], capture_output=True, text=True, check=True)
    assert 7190 < int(ahead.stdout) - time.time() < 7210
    run = tmp_path / "two"
    first, other = start(hosts, recipe, 0), start(hosts, recipe, 1)
    wait_until(lambda: logged_steps(run) > 7)
    kill_host(hosts, "h1")
    other.wait()
    wait_until(lambda: events_of(run, "incident") != [])
    assert finish(first, start(hosts, recipe, 1)) == [0, 0]
    other.stdout.close()
    [incident] = events_of(run, "incident")
    assert (incident["host"], incident["kind"]) == ("h1", "host")
    assert_same_run(undisturbed(recipe), run)


@pytest.mark.slow
def test_a_host_that_loses_its_disk_resumes_from_the_copy_of_its_snapshot_on_the_other(recipe, hosts, tmp_path):
    snapshots = f"checkpoint={{every_steps: null, local: {{dir: '{tmp_path}/disk{{node}}', every_seconds: 1}}}}"
    run = tmp_path / "two"
    first, other = start(hosts, recipe, 0, snapshots), start(hosts, recipe, 1, snapshots)
    wait_until(lambda: len(events_of(run, "snapshot")) > 1 if (run / "events.jsonl").exists() else False)
    kill_host(hosts, "h1")
    other.wait()
    shutil.rmtree(tmp_path / "disk1")
    assert finish(first, start(hosts, recipe, 1, snapshots)) == [0, 0]
    other.stdout.close()
    assert events_of(run, "resume")[-1]["step"] > 0, "nothing but snapshots was saved before"
    assert_same_run(undisturbed(recipe), run)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 0], ids=["the other host", "the leader, which serves the store"])
def test_after_a_cut_of_the_network_the_host_is_named_and_the_run_has_the_bits_of_one_machine(
    recipe, hosts, lost, tmp_path
):
    run = tmp_path / "two"
    processes = [start(hosts, recipe, node) for node in range(2)]
    wait_until(lambda: logged_steps(run) > 7)
    hosts.switch("link", "set", f"p{lost}", "down")
    wait_until(lambda: events_of(run, "incident") != [])
    hosts.switch("link", "set", f"p{lost}", "up")
    assert finish(*processes) == [0, 0]
    [incident] = events_of(run, "incident")
    assert incident["host"] == f"h{lost}"
    assert (
        incident["cause"]
        == f"host h{lost} (ranks {2 * lost} to {2 * lost + 1}): its network interface eth0 has no link"
    )
    assert_same_run(undisturbed(recipe), run)
