"""First contact of hlat with a GPU: everything that only a GPU can answer, in one call of at most nine minutes.

    step --its own process, with a limit--> numbers beside their predictions --> results.json, written after every step
    while the first steps run: predictions by rehearsal and planner; graphs of the later steps into the compilers' cache

    python3 benchmarks/gpu/first_contact.py [--carried FOLDER]           all steps, the most valuable first
    python3 benchmarks/gpu/first_contact.py --only r8 parity             these steps
    python3 benchmarks/gpu/first_contact.py --again RESULTS.json         what failed or was not reached
    python3 benchmarks/gpu/first_contact.py --device cpu --tiny          every line of it on a CPU, with small models

This file imports nothing but Python: a step that crashes, hangs or cannot be imported costs its own result only.
README.md beside it says what each step answers, and what to change by its number.
"""

import argparse
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from kit import nvidia_smi
from kit.environment import KIT, python_path, results_folder, unpack, variables, working_folder
from kit.processes import Started
from kit.report import Results, read_json, table
from kit.table import CASES, CEILINGS, WARM, Step, chosen

BUDGET = 540.0  # seconds: a command on the device machine may take 600
LEAST = 12.0  # seconds that a step needs to say anything: below, it is not started
RESERVE = 6.0  # seconds for the end of the call
PREDICTION_WAIT = 40.0
WARM_WAIT = 60.0


class Call:
    """One call of the kit.

    Args:
        options: command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._began, self._options = time.monotonic(), options
        self._work = working_folder(options.work)
        self._out = results_folder(options.out or os.environ.get("OUT") or "first_contact_results", self._work)
        for name in ("results", "output", "site"):
            (self._work / name).mkdir(exist_ok=True)
        earlier = read_json(Path(options.again)) if options.again else {}
        self._results = Results(self._out, {"command": sys.argv, "date": time.strftime("%Y-%m-%d %H:%M:%S")}, earlier)
        self._steps = self._left(chosen(options.only), earlier)
        self._background: dict[str, Started] = {}
        self._environment = self._prepare()
        self._warmed = False

    def _left(self, steps: list[Step], earlier: dict[str, Any]) -> list[Step]:
        """Leave out the steps that an earlier call has finished; the first one always runs, on every machine."""
        done = {name for name, result in (earlier.get("steps") or {}).items() if result.get("ok") is True}
        return [step for step in steps if step.name not in done or step.name == "machine"]

    def _prepare(self) -> dict[str, str]:
        """Make the environment of the steps."""
        head, options, site = self._results.content["call"], self._options, self._work / "site"
        on_cpu = options.device == "cpu"
        if options.carried:
            head["wheels"] = unpack(Path(options.carried).absolute() / "wheels", site)
        environment = variables(self._work, site, on_cpu)
        environment["PYTHONPATH"], head["import failures"] = python_path(site, environment)
        os.environ["PATH"] = environment["PATH"]  # the driver asks nvidia-smi too
        head |= {"python": sys.version, "PYTHONPATH": environment["PYTHONPATH"], "nvidia-smi": nvidia_smi.facts()}
        self._results.write()
        return environment

    @property
    def _left_seconds(self) -> float:
        return self._options.budget - (time.monotonic() - self._began) - RESERVE

    def run(self) -> int:
        """Run the steps; return the exit code: 0 if all are right."""
        try:
            if self._steps and self._steps[0].name != "machine":
                self._start_all_background(str(nvidia_smi.facts().get("name") or ""))
            for step in self._steps:
                try:
                    self._run_step(step)
                    if step.name == "machine" and not self._goes_on():
                        break
                except Exception:  # a defect of this file must not cost the other steps
                    result = self._results.steps.setdefault(step.name, {})
                    result |= {"ok": False, "error": "the kit itself failed", "tail": traceback.format_exc()[-3000:]}
        finally:
            self._end_background()
            self._results.write()
        print(table(self._results.steps), flush=True)
        print(f"{time.monotonic() - self._began:.0f} s; results in {self._out}", flush=True)
        return 0 if all(result.get("ok") is True for result in self._results.steps.values()) else 1

    def _goes_on(self) -> bool:
        """Start the background processes after the first step, whose ceilings they would disturb.

        Returns:
            False if there is no device to measure.
        """
        numbers = self._results.steps["machine"].get("numbers") or {}
        if numbers.get("device available") is False:
            print("torch sees no accelerator: no other step can say anything here", flush=True)
            return False
        self._start_all_background(str(numbers.get("device name") or nvidia_smi.facts().get("name") or ""))
        return True

    def _start_all_background(self, chip: str) -> None:
        """Start what predicts and what compiles the cases of all steps."""
        wanted = [case for case in CASES if any(case in step.cases for step in self._steps)]
        if wanted:
            hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # it needs no GPU
            self._start_background("predict", ["kit.predict", chip, *wanted], hidden)
        few = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
        for number, cases in enumerate(WARM):
            if mine := [case for case in cases if case in wanted]:
                self._start_background(f"warm-{number}", ["kit.warm", *mine], few)

    def _command(self, module: str, function: str, result: Path, arguments: list[str]) -> list[str]:
        options = self._options
        fixed = [f"--device={options.device}", f"--work={self._work}", f"--result={result}"]
        fixed += ["--tiny"] if options.tiny else []
        fixed += [f"--carried={Path(options.carried).absolute()}"] if options.carried else []
        return [sys.executable, str(KIT / "kit" / "child.py"), *fixed, module, function, *arguments]

    def _start_background(self, name: str, arguments: list[str], variables: dict[str, str]) -> None:
        result = self._work / "results" / f"{name}.json"
        result.unlink(missing_ok=True)
        module, rest = arguments[0], arguments[1:]
        command = self._command(module, "run", result, rest)
        self._background[name] = self._start(name, command, variables)

    def _start(self, name: str, command: list[str], variables: dict[str, str] | None = None) -> Started:
        output = self._work / "output" / f"{name}.txt"
        return Started(command, output, self._environment | (variables or {}), KIT.parents[1])

    def _run_step(self, step: Step) -> None:
        """Run one step; its result is there whatever happens to it."""
        if self._left_seconds < LEAST:
            if step.name not in self._results.steps:
                self._results.steps[step.name] = {"ok": None, "error": "not started: the time was used up"}
            return
        predicted = self._predictions(step)
        if step.needs_warm_cache:
            self._wait_for_warm_cache()
        limit = max(min(step.limit * self._options.slower, self._left_seconds), 1.0)
        # The prediction is on disk before the step runs.
        self._results.steps[step.name] = {"ok": None, "title": step.title, "predicted": predicted, "error": "running"}
        self._results.write()
        file = self._work / "results" / f"{step.name}.json"
        file.unlink(missing_ok=True)
        on_cpu = {"TRITON_INTERPRET": "1"} if self._options.device == "cpu" and step.name == "kernels" else {}
        if step.alone:
            self._signal_compilers(signal.SIGSTOP)
        began = time.monotonic()
        try:
            started = self._start(
                step.name, self._command(step.module, step.function, file, list(step.arguments)), on_cpu
            )
        except OSError as error:
            self._signal_compilers(signal.SIGCONT)
            self._results.steps[step.name]["error"] = f"cannot be started: {error}"
            return
        try:
            problem = started.wait(limit)
        finally:
            started.end()  # also if this process is asked to stop
            self._signal_compilers(signal.SIGCONT)
        result = read_json(file)
        if not problem and not result:
            problem = "it has written no result"
        result["ok"] = not problem and result.get("ok") is True
        result |= {"title": step.title, "predicted": predicted, "seconds": round(time.monotonic() - began, 1)}
        if problem:
            result["error"] = problem
        if not result["ok"]:
            result["tail"] = started.tail()
        self._results.steps[step.name] = result
        self._results.log(step.name, started.output)
        self._results.write()
        print(table({step.name: result}).partition("\n")[2], end="", flush=True)

    def _compilers(self) -> dict[str, Started]:
        """Return the background processes that use the GPU, by name."""
        return {name: worker for name, worker in self._background.items() if name.startswith("warm")}

    def _signal_compilers(self, number: signal.Signals) -> None:
        for worker in self._compilers().values():
            worker.signal_all(number)

    def _predictions(self, step: Step) -> dict[str, Any]:
        """Wait for the predictions of a step, for a while; return them, or the reason why one is missing."""
        file, worker = self._work / "results" / "predict.json", self._background.get("predict")
        until = time.monotonic() + min(PREDICTION_WAIT * self._options.slower, max(0.0, self._left_seconds - LEAST))
        found: dict[str, Any] = {}
        while step.cases and worker is not None:
            found = (read_json(file).get("numbers") or {}) if file.exists() else {}
            if all(case in found for case in step.cases) or worker.has_ended() or time.monotonic() > until:
                break
            time.sleep(0.2)
        missing = "no prediction: " + ("the process has not run" if worker is None else worker.tail()[-300:])
        ceilings = CEILINGS.get(str(nvidia_smi.facts().get("name")), {}) if step.name == "machine" else {}
        return {**ceilings, **step.expected, **{case: found.get(case, missing) for case in step.cases}}

    def _wait_for_warm_cache(self) -> None:
        """Wait once until the graphs are compiled, for a while, then end what is left: it would disturb the clock."""
        if self._warmed:
            return
        self._warmed = True
        until = time.monotonic() + min(WARM_WAIT * self._options.slower, max(0.0, self._left_seconds - LEAST))
        workers = self._compilers()
        while time.monotonic() < until and not all(worker.has_ended() for worker in workers.values()):
            time.sleep(0.2)
        for name in workers:
            self._end(name)

    def _end(self, name: str) -> None:
        worker = self._background.pop(name)
        state = worker.wait(0.1) or "ended"
        result = read_json(self._work / "results" / f"{name}.json")
        self._results.content["background"][name] = {**result, "state": state, "seconds": round(worker.seconds, 1)}
        if result.get("ok") is not True:
            self._results.content["background"][name]["tail"] = worker.tail()
        self._results.log(name, worker.output)

    def _end_background(self) -> None:
        for name in list(self._background):
            self._end(name)


def stop(number: int, frame: object) -> None:
    """End as after Ctrl-C: results are written, and processes ended."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder of the results; default: $OUT, or first_contact_results")
    parser.add_argument("--work", help="folder for everything else; default: in the folder for temporary files")
    parser.add_argument("--carried", help="folder that carry.py has made: wheels, and prepared tokens")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds of the whole call")
    parser.add_argument("--slower", type=float, default=1.0, help="factor of the steps' limits, for a slower machine")
    parser.add_argument("--device", default="cuda", help="device type: cuda or cpu")
    parser.add_argument("--tiny", action="store_true", help="small models, which a CPU computes in seconds")
    parser.add_argument("--only", nargs="+", default=[], metavar="STEP", help="steps to run; r8 means r8 alone")
    parser.add_argument("--again", metavar="RESULTS", help="results.json of an earlier call: run what it has not got")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the kit."""
    signal.signal(signal.SIGTERM, stop)
    sys.exit(Call(parsed()).run())


if __name__ == "__main__":
    main()
