"""Real runs on several hosts are bit for bit the run of one machine with the same layout."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import net_hosts as simulated
from tests.support.launch.launching import wait_until
from tests.support.launch.net_hosts import net_hosts
from tests.support.same_runs import assert_same_run, events_of

RECIPE = """
run: {{name: r, dir: {folder}/NAME, device: cpu}}
model: {{vocab_size: 320, layers: 2, hidden_size: 32, intermediate_size: 96, heads: 4}}
data: {{path: {folder}/text.txt, prepared_dir: {folder}/data, sequence_length: 32,
       tokenizer: {{train: bpe, vocab_size: 320}}, validation: {{by: tail, fraction: 0.1}}}}
batch: {{global_batch: 8, micro_batch: 2}}
parallel: {{tensor: 2}}
training: {{steps: 40, log_every: 1}}
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
    assert "host 0: finished at step 40" in done.stdout
    assert_same_run(undisturbed(recipe), recipe.parent / "two")


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 0], ids=["the other host", "the leader, which serves the store"])
def test_after_a_cut_of_the_network_the_host_is_named_and_the_run_has_the_bits_of_one_machine(recipe, lost, tmp_path):
    if reason := simulated.missing():
        pytest.skip(reason)
    run = tmp_path / "two"
    with net_hosts(tmp_path / "net", 2) as hosts:
        processes = []
        for node in range(2):
            words = command(recipe, "two", "--nproc", "2", "--nodes", "2", "--node", str(node))
            processes.append(hosts.start(f"h{node}", *words, "--address", hosts.address(node)))
        metrics = run / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 7)
        hosts.switch("link", "set", f"p{lost}", "down")
        wait_until(lambda: events_of(run, "incident") != [])
        hosts.switch("link", "set", f"p{lost}", "up")
        assert [process.wait(120) for process in processes] == [0, 0]
        for process in processes:
            process.stdout.close()
    [incident] = events_of(run, "incident")
    assert incident["host"] == f"h{lost}"
    assert (
        incident["cause"]
        == f"host h{lost} (ranks {2 * lost} to {2 * lost + 1}): its network interface eth0 has no link"
    )
    assert json.loads(metrics.read_text().splitlines()[-1])["step"] == 40
    assert_same_run(undisturbed(recipe), run)
