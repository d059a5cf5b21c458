"""The kit for the first contact with a GPU, without one: every line runs on a CPU, and no step can end the others."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

from hlat.model import layers
from hlat.runtime.backend.device import restored_settings
from tests.support.launch.launching import wait_until

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "benchmarks" / "gpu"
FAKE_STEPS = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

def fine(context):
    context.found({"speed": 2.0})

def sees_its_prediction(context):
    steps = json.loads(Path(os.environ["RESULTS"]).read_text())["steps"]
    context.check("the prediction is on disk", steps["predicted"]["predicted"] == {"speed": 7})
    context.check("so is the step before", steps["fine"]["numbers"] == {"speed": 2.0})
    context.found({"speed": 8, "not a number": float("nan")})

def part_fails(context):
    with context.part("first"):
        raise RuntimeError("of the first part")
    with context.part("second"):
        context.found({"second": 2})

def crashes(context):
    context.found({"before": 1})
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)

def hangs(context):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    context.found({"child": child.pid})
    time.sleep(600)
"""


HANGS = 12.0  # seconds: the limit of a step that hangs


@pytest.fixture
def kit(monkeypatch):
    """Import a module of benchmarks/gpu by name."""
    monkeypatch.syspath_prepend(str(KIT))
    return importlib.import_module


def context_of(kit, folder: Path, device: str = "cpu"):
    """Return the context of a step with tiny models."""
    (folder / "results").mkdir(parents=True, exist_ok=True)
    return kit("kit.child").Context(device, True, folder, folder / "result.json")


def is_right(context) -> None:
    """Assert that a step has run with numbers, and that its checks hold."""
    assert context.ok, (context.errors, context.checks)
    assert context.numbers


@pytest.fixture
def fake_call(kit, monkeypatch, tmp_path):
    """Return a function that runs fake steps in a call of the kit, and returns its exit code and results.json."""
    (tmp_path / "fake_steps.py").write_text(FAKE_STEPS)
    driver, table = kit("first_contact"), kit("kit.table")
    started = kit("kit.processes").Started
    wait, begun = started.wait, tmp_path / "work" / "results" / "hang.json"

    def wait_until_it_hangs(process, limit: float) -> str:
        """The limit of the step that hangs is over when it has said what it has started."""
        if limit == HANGS:
            wait_until(lambda: begun.exists() and '"child"' in begun.read_text())
        return wait(process, 0.0 if limit == HANGS else limit)

    monkeypatch.setattr(started, "wait", wait_until_it_hangs)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RESULTS", str(tmp_path / "out" / "results.json"))

    def call(steps: dict[str, str], *words: str):
        limits = {"hangs": HANGS}
        expected = {"sees_its_prediction": {"speed": 7}}
        made = [
            table.Step(each, "fake_steps", limits.get(name, 1200.0), each, name, expected=expected.get(name, {}))
            for each, name in steps.items()
        ]
        monkeypatch.setattr(table, "STEPS", tuple(made))
        options = driver.parsed(["--device=cpu", f"--out={tmp_path / 'out'}", f"--work={tmp_path / 'work'}", *words])
        code = driver.Call(options).run()
        return code, json.loads((tmp_path / "out" / "results.json").read_text())

    return call


def test_a_step_that_crashes_or_cannot_be_imported_costs_its_own_result_only(fake_call, tmp_path):
    code, found = fake_call(
        {
            "crash": "crashes",
            "absent": "no_such_function",
            "part": "part_fails",
            "fine": "fine",
            "predicted": "sees_its_prediction",
        }
    )
    steps = found["steps"]
    assert code == 1 and [steps[name]["ok"] for name in steps] == [False, False, False, True, True]
    assert "SIGSEGV" in steps["crash"]["error"] and "last words" in steps["crash"]["tail"]
    assert steps["crash"]["numbers"] == {"before": 1}, "kept from before the crash"
    assert "no_such_function" in steps["absent"]["errors"]["step"]
    assert "of the first part" in steps["part"]["errors"]["first"] and steps["part"]["numbers"] == {"second": 2}
    assert steps["predicted"]["numbers"] == {"speed": 8, "not a number": "nan"}
    assert len(list((tmp_path / "out").iterdir())) <= 8, "more files do not come back"
    table = (tmp_path / "out" / "summary.txt").read_text()
    assert "1.14" in table, "8 measured, 7 predicted"


def test_a_step_that_hangs_is_ended_with_its_children_and_a_second_call_runs_what_failed(fake_call, tmp_path):
    _, found = fake_call({"hang": "hangs", "fine": "fine"})
    hang = found["steps"]["hang"]
    assert "killed at its limit" in hang["error"]
    assert "in hangs" in hang["tail"], "the stack, of faulthandler"
    child = int(hang["numbers"]["child"])
    deadline = time.monotonic() + 600
    while Path(f"/proc/{child}/status").exists() and time.monotonic() < deadline:
        if "State:\tZ" in Path(f"/proc/{child}/status").read_text():
            break
        time.sleep(0.1)
    else:
        assert not Path(f"/proc/{child}").exists(), "its child, in a session of its own, has ended too"
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(found))
    code, again = fake_call({"hang": "fine", "fine": "crashes"}, f"--again={earlier}")
    assert code == 0 and again["steps"]["hang"]["numbers"] == {"speed": 2.0}
    assert again["steps"]["fine"] == found["steps"]["fine"], "it was right, and is not run again"


def test_a_defect_of_the_driver_costs_one_step(fake_call, kit, monkeypatch):
    call = kit("first_contact").Call
    plain = call._predictions
    monkeypatch.setattr(call, "_predictions", lambda self, step: 1 / 0 if step.name == "first" else plain(self, step))
    _, found = fake_call({"first": "fine", "second": "fine"})
    assert "ZeroDivisionError" in found["steps"]["first"]["tail"] and found["steps"]["second"]["ok"] is True


def test_results_go_elsewhere_if_their_folder_cannot_be_written(kit, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert kit("kit.environment").results_folder(str(tmp_path / "file"), tmp_path) == tmp_path / "out"
    assert "cannot be written" in capsys.readouterr().out


def test_steps_that_come_too_late_are_named(fake_call):
    code, found = fake_call({"fine": "fine", "late": "fine"}, "--budget=1")
    assert code == 1 and all("time was used up" in step["error"] for step in found["steps"].values())


def test_an_end_by_sigterm_leaves_results(kit, tmp_path):
    words = ["--device=cpu", "--tiny", f"--out={tmp_path / 'out'}", f"--work={tmp_path / 'work'}"]
    running = subprocess.Popen([sys.executable, str(KIT / "first_contact.py"), *words, "--only", "machine"])
    results = tmp_path / "out" / "results.json"
    while not (results.exists() and "running" in results.read_text()):
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    running.wait(600)
    assert json.loads(results.read_text())["steps"]["machine"]["ok"] is None


@pytest.mark.parametrize(
    ("printed", "used"),
    [
        ("1135", 1135),
        ("1135 MiB\n20 MiB", 1135),
        ("[N/A]", None),
        ("", None),
        ("failed with 9: no devices", None),
        ("[Insufficient Permissions]", None),
    ],
)
def test_no_output_of_nvidia_smi_ends_a_step(kit, monkeypatch, printed, used):
    asked = kit("kit.nvidia_smi")
    monkeypatch.setattr(asked, "ask", lambda *arguments: printed)
    assert asked.used_mib() == used
    assert isinstance(asked.facts(), dict) and isinstance(asked.users(), list)


def test_nvidia_smi_may_be_missing(kit, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = kit("kit.nvidia_smi")
    assert asked.ask().startswith("failed") and asked.used_mib() is None and asked.facts() == {}


def test_what_travels_fits_and_the_command_is_short_enough(kit, tmp_path):
    carry = kit("carry")
    assert carry.travelling_bytes(ROOT) + carry.MOST_CARRIED <= carry.MOST == 64 << 20
    (tmp_path / "large").write_bytes(bytes(carry.MOST_CARRIED + 1))
    with pytest.raises(SystemExit, match="too large"):
        carry.check(ROOT, tmp_path)
    assert all(len(carry.command(again)) < carry.LONGEST_COMMAND == 2000 for again in (False, True))
    done = subprocess.run(["git", "check-ignore", carry.FOLDER + "/x"], cwd=ROOT, check=False)
    assert done.returncode == 0, "it travels because it is named, and is never committed"


def test_wheels_are_used_without_pip(kit, tmp_path):
    environment = kit("kit.environment")
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "broken-1-py3-none-any.whl").write_bytes(b"PK")
    with zipfile.ZipFile(tmp_path / "wheels" / "some-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("some_carried_package/__init__.py", "value = 3")
    lines = environment.unpack(tmp_path / "wheels", tmp_path / "site")
    assert (tmp_path / "site" / "some_carried_package" / "__init__.py").is_file()
    assert "not a zip file" in lines[0]


def test_every_step_is_explained(kit):
    text = (KIT / "README.md").read_text()
    missing = [step.name for step in kit("kit.table").STEPS if f"`{step.name}`" not in text]
    assert missing == []


def test_background_work_is_that_of_the_steps(kit):
    table, shapes = kit("kit.table"), kit("kit.shapes")
    assert set(table.CASES) == {*shapes.CASES, "generation"}
    compiled = [case for cases in table.WARM for case in cases]
    assert sorted(compiled) == sorted(case for case in shapes.CASES if shapes.CASES[case].get("run.compile") != "none")
    assert [step.name for step in table.chosen(["r8"])] == ["r8"] and len(table.chosen([])) == len(table.STEPS)


# Steps in this process, with the smallest models: the same functions as on a GPU. Those left out here start programs
# or compile for longer; the slow test below runs all of them as the command does.
@pytest.mark.parametrize("module", ["machine", "parity", "kernels", "sharded", "generation"])
def test_a_step_runs_on_a_cpu(kit, tmp_path, monkeypatch, module):
    monkeypatch.setattr(kit("kit.parity"), "_UNITS", {"mixed": 2.0**-9, "fp32": 2.0**-24})
    context = context_of(kit, tmp_path)
    with restored_settings():
        kit(f"kit.{module}").run(context)
    is_right(context)


def test_a_wrong_gradient_is_found(kit, tmp_path, monkeypatch):
    """The same comparison with RoPE forgotten in one of the two programs: losses of random tokens hardly show it."""
    parity = kit("kit.parity")
    context = context_of(kit, tmp_path)
    asked = kit("kit.shapes").recipe("parity", True, "cpu", tmp_path, parity.overrides("mixed"))
    plain, calls = parity.trace, []

    def trace(*given, **named):
        calls.append(named)
        with pytest.MonkeyPatch.context() as patch:
            if named.get("device") is not None:
                patch.setattr(layers, "rotate", lambda x, cos, sin: x)
            return plain(*given, **named)

    monkeypatch.setattr(parity, "trace", trace)
    with restored_settings():
        parity.compare(context, "mixed", asked)
    assert len(calls) == 4 and context.checks["mixed: two runs have the same bits"] is True
    assert context.checks["mixed: gradients are as near to float64 as a CPU's"] is not True


def test_a_case_of_speed_runs_on_a_cpu_and_has_its_prediction(kit, tmp_path):
    context = context_of(kit, tmp_path)
    with restored_settings():
        kit("kit.predict").run(context, "a chip that nobody knows", "r8-eager", "generation")
        predicted = context.numbers["r8-eager"]
        kit("kit.speed").run(context, "r8-eager")
    is_right(context)
    assert predicted.keys() & context.numbers.keys() >= {"step_seconds", "peak_allocated_gib", "tokens_per_second"}
    assert context.numbers["slowest_kernels"] and context.numbers["mfu_causal"] > 0


def test_without_a_rehearsal_the_plan_predicts(kit, tmp_path, monkeypatch):
    predict, context = kit("kit.predict"), context_of(kit, tmp_path)
    monkeypatch.setattr(predict.hlat, "rehearse", lambda *given, **named: 1 / 0)
    predict.run(context, "NVIDIA H200", "r8")
    found = context.numbers["r8"]
    assert "ZeroDivisionError" in found["not_rehearsed"] and found["cluster"] == "1xh200:1"
    assert found["step_seconds"] > 0 and found["used_gib"] > 0


def test_a_prediction_is_for_the_chip_that_is_there(kit):
    predict = kit("kit.predict")
    assert predict.cluster_of("NVIDIA H200") == "1xh200:1"
    assert predict.cluster_of("NVIDIA H100 80GB HBM3") == predict.cluster_of("") == "1xh100:1"


@pytest.mark.slow
def test_the_complete_command_runs_on_a_cpu(tmp_path):
    words = ["--device=cpu", "--tiny", f"--out={tmp_path / 'out'}", f"--work={tmp_path / 'work'}"]
    patience = ["--budget=7200", "--slower=30"]  # limits are for the clock of a GPU's machine
    command = [sys.executable, str(KIT / "first_contact.py"), *words, *patience]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert all(step["ok"] for step in found["steps"].values())
    assert all(worker["ok"] for worker in found["background"].values())
    files = list((tmp_path / "out").iterdir())
    assert len(files) <= 8 and all(file.stat().st_size < 16 << 20 for file in files)
