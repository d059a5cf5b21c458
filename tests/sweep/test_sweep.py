"""A sweep trains every combination once, whatever interrupts it, and says which was best."""

import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.command import main
from hlat.config import RecipeError
from hlat.runtime.process import REQUEUE_CODE
from hlat.sweep import array_script, execution, plan_sweep
from hlat.sweep.runs import combinations, parse_axes

VALUES = st.lists(st.from_regex(r"[a-z0-9][a-z0-9.e-]{0,6}", fullmatch=True), min_size=1, max_size=4, unique=True)


@given(st.dictionaries(st.from_regex(r"[a-z]{1,4}\.[a-z]{1,4}", fullmatch=True), VALUES, max_size=4))
def test_every_combination_is_one_run(axes: dict[str, list[str]]) -> None:
    """Witness: itertools.product over the lists that the arguments were written from."""
    written = {field: values for field, values in axes.items() if not (len(values) == 1 and ".." in values[0])}
    parsed = parse_axes([f"{field}={','.join(values)}" for field, values in written.items()])
    assert list(combinations(parsed)) == list(itertools.product(*written.values()))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1..4", ["1", "2", "3", "4"]),
        ("4..1", ["4", "3", "2", "1"]),
        ("10..50:20", ["10", "30", "50"]),
        ("[1,2],[3,4]", ["[1,2]", "[3,4]"]),
        ("{kind: cosine, min_ratio: 0.1}", ["{kind: cosine, min_ratio: 0.1}"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("", [""]),
    ],
)
def test_values_are_divided_where_a_person_divides_them(text: str, values: list[str]) -> None:
    assert list(parse_axes([f"a.b={text}"])[0].values) == values


def test_all_mistakes_of_the_axes_are_said_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        parse_axes(["optimizer.lr", "a.b=1,,2", "c.d=1,1", "e.f=1", "e.f=2", "g.h=1..10000", "i.j=1,2"])
    message = str(caught.value)
    for part in (
        "optimizer.lr: is no field with values",
        "a.b = ",
        "c.d = ",
        "training.seed",
        "e.f: is given twice",
        "runs",
    ):
        assert part in message


@pytest.fixture
def recipe(recipe_file: Path, corpus: Path) -> list[str]:
    return [str(recipe_file), f"data.path={corpus}", "training.steps=4", "schedule.warmup_steps=1"]


def test_the_recipes_of_all_runs_are_checked_first(recipe: list[str], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"(?s)batch\.micro_batch = 3.*optimizer\.lr = -1"):
        plan_sweep(recipe[0], [*recipe[1:], "optimizer.lr=1e-3,-1", "batch.micro_batch=4,3"], str(tmp_path / "sweep"))


def test_a_sweep_of_names_is_refused(recipe: list[str], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"run\.name: does not change how a run trains\. Leave it out"):
        plan_sweep(recipe[0], [*recipe[1:], "run.name=a,b"], str(tmp_path / "sweep"))
    assert plan_sweep(recipe[0], [*recipe[1:], "run.name=a"], str(tmp_path / "sweep")).runs


def test_names_tell_runs_apart_and_stay_in_the_folder(recipe: list[str], tmp_path: Path) -> None:
    words = [*recipe[1:], "optimizer.lr=1e-3,2e-3", "schedule.kind=cosine,constant", "evaluation.every_steps=2,4"]
    words += ["checkpoint.every_steps=2,4", "data.text_column=../../etc,a b"]
    planned = plan_sweep(recipe[0], words, str(tmp_path / "sweep"))
    assert len({run.folder for run in planned.runs}) == len(planned.runs) == 32
    assert all(run.folder.parent == tmp_path / "sweep" for run in planned.runs)
    assert "evaluation.every_steps=2" in planned.runs[0].name, "every_steps alone would name two fields"
    assert not any("prepared_dir" in word for run in planned.runs for word in run.overrides), "texts may differ"


class _ForkedRun:
    """A run forked from the sweep, which has imported hlat, with what a sweep uses of ``subprocess.Popen``."""

    def __init__(self, command: list[str], process_group: int, stdout: None) -> None:
        self._pid = os.fork()
        if self._pid == 0:
            os.setpgid(0, process_group)
            sys.argv = command[command.index("hlat") :]
            code: object = 1
            try:
                main()
            except SystemExit as end:
                code = end.code
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code if isinstance(code, int) else 1)

    def wait(self) -> int:
        """Return the exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def _fork_runs() -> None:
    execution.subprocess = SimpleNamespace(Popen=_ForkedRun, DEVNULL=subprocess.DEVNULL)


def test_a_sweep_runs_resumes_and_ranks(cli, recipe: list[str], tmp_path: Path) -> None:
    """One run is lost between the two commands: only that one is trained again, to the same loss."""
    command = ["sweep", *recipe, "optimizer.lr=1e-4,3e-3", "--to", tmp_path / "sweep"]
    first = cli(*command, prepare=_fork_runs)
    assert first.returncode == 0, first.stderr
    folders = sorted(path.name for path in (tmp_path / "sweep").iterdir() if path.name.startswith("lr="))
    assert folders == ["lr=1e-4", "lr=3e-3"]
    assert (tmp_path / "sweep" / "report.html").is_file()
    assert (tmp_path / "sweep" / "data" / "manifest.json").is_file(), "texts are prepared once for all runs"
    before = json.loads(cli(*command, "--list", "--json").stdout)
    losses = [run["validation_loss"] for run in before]
    assert losses == sorted(losses)
    assert before[0]["values"]["optimizer.lr"] == "3e-3", "four steps from random weights: the larger rate is ahead"
    shutil.rmtree(tmp_path / "sweep" / "lr=1e-4")
    again = cli(*command, prepare=_fork_runs)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("finished before") == 1
    after = json.loads(cli(*command, "--list", "--json").stdout)
    assert [run["validation_loss"] for run in after] == losses


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_sweep_alone_ends_its_run_which_saves(recipe: list[str], tmp_path: Path, number: int) -> None:
    words = [
        recipe[1],
        "schedule.warmup_steps=1",
        "training.steps=100000",
        "training.seed=1..2",
        "checkpoint.every_steps=100000",
    ]
    command = [sys.executable, "-m", "hlat", "sweep", recipe[0], *words, "--to", str(tmp_path / "sweep")]
    first = tmp_path / "sweep" / "seed=1"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as sweep:
        while not (first / "metrics.jsonl").exists():
            assert sweep.poll() is None
            time.sleep(0.1)
        sweep.send_signal(number)
        code = sweep.wait()
    assert code in (128 + number, REQUEUE_CODE)
    assert list((first / "checkpoints").glob("step-*")), "it has ended, and saved before"
    assert not (tmp_path / "sweep" / "seed=2").exists(), "and no other run was begun"
    left = [folder / "cmdline" for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    assert not [file for file in left if os.fsencode(first) in _read(file)], "and no process is left behind"


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # that process has ended
        return b""


def test_a_run_that_fails_does_not_stop_the_others(cli, recipe: list[str], tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "seed=1").write_text("not a folder")
    done = cli("sweep", *recipe, "training.seed=1..2", "--to", tmp_path / "sweep")
    assert done.returncode not in (0, 1)
    found = json.loads(
        cli("sweep", *recipe, "training.seed=1..2", "--to", tmp_path / "sweep", "--list", "--json").stdout
    )
    assert {run["name"]: run["state"] for run in found} == {"seed=1": "not begun", "seed=2": "finished"}


def test_the_script_of_an_array_runs_the_element_it_is_told(recipe: list[str], tmp_path: Path) -> None:
    """Witness: bash runs the script, with a program in the place of Python that prints its arguments."""
    axes = ["training.seed=1..3", "data.text_column=it's,b"]
    planned = plan_sweep(recipe[0], [*recipe[1:], *axes], str(tmp_path / "sweep"))
    options = ["--time=1:00:00", '--comment=it is "mine"', f"--error={tmp_path / 'logs' / '%a.err'}"]
    script, folders = array_script(planned, [*recipe[1:], *axes], options, 2)
    assert folders == [tmp_path / "sweep", tmp_path / "logs"]
    assert "#SBATCH --array=0-5%2" in script
    assert "#SBATCH --time=1:00:00" in script
    assert '#SBATCH "--comment=it is \\"mine\\""' in script  # as hlat launch slurm writes it
    program = script.split("exec ")[1].split()[0]
    shown = script.replace(f"exec {program}", "exec printf '%s\\n'")
    environment = {"SLURM_ARRAY_TASK_ID": "4", "PATH": "/usr/bin:/bin"}
    printed = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True, env=environment)
    words = printed.stdout.splitlines()
    assert words[-2:] == ["--only", "4"]
    assert words[words.index("sweep") + 1 :][: len(recipe) + 2] == [recipe[0], *recipe[1:], *axes]
    assert shlex.split(script.splitlines()[-1])


@pytest.mark.parametrize(
    ("words", "warns"),
    [
        ((), True),
        (("--sbatch=--time=1:00:00",), True),
        (("--sbatch", "time=1:00:00"), True),
        (("--sbatch=--gpus-per-node=2",), False),
        (("--sbatch", "gres=gpu:2"), False),
        (("--sbatch=--exclusive",), False),
        (("run.device=cpu",), False),
    ],
)
def test_options_of_sbatch_are_those_of_launch_slurm_and_a_missing_accelerator_is_said(
    cli, recipe_file: Path, corpus: Path, tmp_path: Path, words, warns
) -> None:
    recipe = [recipe_file, f"data.path={corpus}"]
    done = cli("sweep", *recipe, "training.seed=1,2", "--to", tmp_path / "s", "--slurm", "--dry-run", *words)
    assert done.returncode == 0, done.stderr
    assert ("asks Slurm for no accelerators" in done.stderr) == warns
    assert ("#SBATCH --mem=0\n" in done.stdout) == ("--sbatch=--exclusive" in words)
    given = [word.removeprefix("--sbatch=").removeprefix("--") for word in words if "=" in word and "." not in word]
    assert all(f"#SBATCH --{option}\n" in done.stdout for option in given), done.stdout


def test_a_wrong_option_of_sbatch_is_refused(cli, recipe_file: Path, corpus: Path, tmp_path: Path) -> None:
    words = ["sweep", recipe_file, f"data.path={corpus}", "training.seed=1,2", "--slurm", "--dry-run"]
    done = cli(*words, "--sbatch=--comment=a\nb", "--sbatch=-G2")
    assert done.returncode == 2 and '--sbatch "--comment=a\\u000ab": control characters' in done.stderr
    assert "--sbatch '-G2': expected one option of sbatch" in done.stderr
