"""Faults of hosts: seconds to detection, who was blamed, and whether the run is bitwise that of one machine.

    python benchmarks/host_faults.py text.txt --folder FOLDER [--only NAME ...] [--phases steps save ...]
    python benchmarks/host_faults.py text.txt --folder FOLDER --random 20 --seed 0      random faults, a run for each
    python benchmarks/host_faults.py text.txt --folder FOLDER --storm 10 --seed 0       all in one run, one a minute

Hosts are network namespaces on this machine, with two processes each, tensor parallel inside and data parallel across
(or a pipeline across). Each drill starts ``hlat train --nodes N`` on every host, injects a fault at a step, in a save,
in validation or in the start-up, mends it, and compares every logged loss and the final state with those of the same
layout on one host without a fault. A storm also gives the goodput, beside Daly's formula for the same numbers. Needs
root, iproute2 and iptables.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hlat.resilience import expected_goodput  # noqa: E402
from results import Recorder  # noqa: E402
from tests.support.launch.net_hosts import NetHosts, net_hosts  # noqa: E402
from tests.support.same_runs import assert_same_run  # noqa: E402

RECIPE = """
run: {{name: r, device: cpu}}
model: {{vocab_size: 512, layers: 4, hidden_size: 64, intermediate_size: 160, heads: 4}}
data: {{path: {text}, sequence_length: 64, prepared_dir: {folder}/data,
        tokenizer: {{train: bpe}}, validation: {{by: tail, fraction: 0.05}}}}
batch: {{global_batch: 16, micro_batch: 2}}
optimizer: {{kind: adamw, lr: 1.0e-3}}
training: {{steps: {steps}, log_every: 5}}
evaluation: {{every_steps: 20}}
checkpoint: {{every_steps: 10}}
recovery: {{hang_seconds: 20, backoff_seconds: 1}}
tracking: {{console: plain, tensorboard: false}}
"""
LAYOUTS = {"tp2 dp": "parallel: {tensor: 2}\n", "tp2 pp2": "parallel: {tensor: 2, pipeline: 2}\n"}


@dataclass
class Drill:
    """A run on several hosts, and what happens to it."""

    hosts: NetHosts
    folder: Path
    name: str
    layout: str
    count: int
    steps: int
    processes: dict[int, subprocess.Popen] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / self.name

    def start(self, node: int) -> None:
        recipe = self.folder / f"{self.layout.replace(' ', '-')}-{self.steps}.yaml"
        address = self.hosts.address(node)
        words = ["-m", "hlat", "train", str(recipe), f"run.dir={self.run_dir}", "--nproc", "2"]
        words += ["--nodes", str(self.count), "--node", str(node), "--address", address]
        log = (self.folder / f"{self.name}-h{node}.log").open("ab")
        # A session of its own: a kill of the host is a kill of its processes, found by namespace.
        self.processes[node] = subprocess.Popen(
            [str(self.hosts.transport), f"h{node}", sys.executable, *words],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def events(self, *kinds: str) -> list[dict]:
        with contextlib.suppress(OSError):
            lines = (self.run_dir / "events.jsonl").read_text().splitlines()
            return [event for event in map(json.loads, lines) if not kinds or event["event"] in kinds]
        return []

    def step(self) -> int:
        with contextlib.suppress(OSError, IndexError, ValueError, KeyError):
            return json.loads((self.run_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        return -1

    def signal_host(self, node: int, number: int) -> None:
        for pid in self.hosts.pids(f"h{node}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def cut(self, node: int) -> None:
        self.hosts.switch("link", "set", f"p{node}", "down")

    def mend(self, node: int) -> None:
        self.hosts.switch("link", "set", f"p{node}", "up")

    def lose(self, percent: float) -> None:
        for space in self.hosts.names:
            rule = ["-m", "statistic", "--mode", "random", "--probability", str(percent / 100), "-j", "DROP"]
            self.hosts.on(space, "iptables", "-A", "INPUT", "-i", "eth0", *rule)

    def delay(self, node: int) -> None:
        shape = ["root", "tbf", "rate", "20mbit", "burst", "2kb", "latency", "50ms"]
        self.hosts.on_switch("tc", "qdisc", "replace", "dev", f"p{node}", *shape)

    def listening(self) -> set[str]:
        """Addresses that any process of any host listens on."""
        found = set()
        for name in self.hosts.names:
            words = ["ip", "netns", "exec", self.hosts.space(name), "ss", "-Hltnp"]
            lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
            found |= {f"{name} {line.split()[3].rpartition(':')[0]}" for line in lines}
        return found

    def wait(self, holds, seconds: float = 300.0) -> float:
        begin = time.monotonic()
        while not holds():
            if time.monotonic() - begin > seconds:
                raise TimeoutError(f"{self.name}: nothing happened for {seconds:g} s, at step {self.step()}")
            time.sleep(0.1)
        return time.monotonic() - begin

    def wait_for_incident(self, before: int, seconds: float = 120.0) -> None:
        """Wait until there are more incidents than before, or every command has ended."""
        self.wait(lambda: len(self.events("incident")) > before or drill_is_over(self), seconds)

    def finish(self, seconds: float = 300.0) -> list[int]:
        self.wait(lambda: all(process.poll() is not None for process in self.processes.values()), seconds)
        return [self.processes[node].returncode for node in sorted(self.processes)]

    def clean(self) -> None:
        for node in range(self.count):
            self.signal_host(node, signal.SIGKILL)
            with contextlib.suppress(subprocess.CalledProcessError):
                self.mend(node)
            with contextlib.suppress(subprocess.CalledProcessError):
                self.hosts.on(f"h{node}", "iptables", "-F", "INPUT")
            with contextlib.suppress(subprocess.CalledProcessError):
                self.hosts.on_switch("tc", "qdisc", "del", "dev", f"p{node}", "root")
        for process in self.processes.values():
            process.wait()


@dataclass(frozen=True)
class Fault:
    """A fault of a host.

    Attributes:
        name: its name in the table.
        node: host that it strikes.
        strike: injects it.
        mend: ends it; called so many seconds after the strike, or once it was detected.
        after: seconds until ``mend``; None: once it was detected.
        is_harmless: True if the run should go on without a restart.
    """

    name: str
    node: int
    strike: Callable[[Drill], None]
    mend: Callable[[Drill], None] = lambda drill: None
    after: float | None = None
    is_harmless: bool = False


def restart(node: int) -> Callable[[Drill], None]:
    """Return a function that starts the command on a host again, as a scheduler would."""
    return lambda drill: drill.start(node)


def faults(count: int) -> dict[str, Fault]:
    """All kinds of faults, on the last host and on the leader, which serves the store."""
    last = count - 1
    found = []
    for node, who in ((last, "last host"), (0, "leader")):
        found += [
            Fault(
                f"link of the {who} cut for 10 s",
                node,
                lambda d, n=node: d.cut(n),
                lambda d, n=node: d.mend(n),
                10,
                True,
            ),
            Fault(f"link of the {who} cut", node, lambda d, n=node: d.cut(n), lambda d, n=node: d.mend(n)),
            Fault(f"{who} killed", node, lambda d, n=node: d.signal_host(n, signal.SIGKILL), restart(node)),
            Fault(
                f"{who} stopped",
                node,
                lambda d, n=node: d.signal_host(n, signal.SIGSTOP),
                lambda d, n=node: d.signal_host(n, signal.SIGCONT),
            ),
        ]
    found.append(Fault("5 % of packets lost", last, lambda d: d.lose(5), is_harmless=True))
    found.append(Fault("50 ms delay", last, lambda d: d.delay(last), is_harmless=True))
    return {fault.name: fault for fault in found}


PHASES = {"steps": ("step", 14), "save": ("checkpoint", 20), "validation": ("evaluation", 20), "start": ("start", 0)}


def wait_for(drill: Drill, phase: str, step: int) -> None:
    """Wait until rank 0 is in a phase at or after a step, as its host's status says."""
    kind, _ = PHASES[phase]

    def holds() -> bool:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError):
            ranks = json.loads((drill.run_dir / ".hosts" / "host-00000.json").read_text())["ranks"]
            beat = ranks[0]["beat"]
            if kind == "start":
                return beat is not None and beat["phase"] == "start"
            return beat["step"] >= step and (kind == "step" or beat["phase"] == kind)
        return False

    with contextlib.suppress(TimeoutError):
        if kind in ("checkpoint", "evaluation"):
            # These phases are short: strike when the step before is done, a moment later.
            drill.wait(lambda: _beat_step(drill) >= step)
        else:
            drill.wait(holds)


def _beat_step(drill: Drill) -> int:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError):
        ranks = json.loads((drill.run_dir / ".hosts" / "host-00000.json").read_text())["ranks"]
        return max(rank["beat"]["step"] for rank in ranks if rank["beat"])
    return -1


def carry_out(drill: Drill, reference: Path, fault: Fault, phase: str, step: int) -> dict:
    """Run, strike, mend; return what was seen."""
    for node in range(drill.count):
        drill.start(node)
    wait_for(drill, phase, step)
    listening = drill.listening()
    struck, at = time.monotonic(), drill.step()
    before = len(drill.events("incident"))
    fault.strike(drill)
    detected: float | None = None
    if fault.after is not None:
        time.sleep(fault.after)
        fault.mend(drill)
    elif not fault.is_harmless:
        drill.wait_for_incident(before)
        detected = time.monotonic() - struck
        fault.mend(drill)
    codes = drill.finish()
    incidents = drill.events("incident")[before:]
    blamed = [f"{incident['host']} (rank {incident['rank']}): {incident['cause']}" for incident in incidents]
    try:
        assert_same_run(reference, drill.run_dir)
        same = True
    except AssertionError as error:
        same = False
        blamed.append(f"DIFFERS: {str(error)[:200]}")
    right = fault.is_harmless or any(incident["host"] == f"h{fault.node}" for incident in incidents)
    return {
        "fault": fault.name,
        "phase": phase,
        "struck at step": at,
        "seconds": detected,
        "incidents": len(incidents),
        "blamed": blamed,
        "right": right,
        "codes": codes,
        "listening": sorted(listening),
        "same": same,
    }


def storm(drill: Drill, reference: Path, options: argparse.Namespace, record: Recorder) -> None:
    """Strike a run about once a minute until it has finished; print what was seen, and the goodput."""
    draw = random.Random(options.seed)
    known = [fault for fault in faults(options.hosts).values() if not fault.is_harmless]
    for node in range(drill.count):
        drill.start(node)
    detections, struck = [], 0
    while not drill_is_over(drill):
        next_strike = time.monotonic() + draw.expovariate(1 / 60)
        while time.monotonic() < next_strike and not drill_is_over(drill):
            time.sleep(0.1)
        if drill_is_over(drill) or struck == options.storm:
            break
        fault, before, at = draw.choice(known), len(drill.events("incident")), time.monotonic()
        struck += 1
        fault.strike(drill)
        with contextlib.suppress(TimeoutError):
            drill.wait_for_incident(before, 60)
        incidents, seconds = drill.events("incident"), time.monotonic() - at
        fault.mend(drill)
        if len(incidents) > before:
            detections.append(seconds)
            print(f"{fault.name} at step {drill.step()}: {seconds:.1f} s, {incidents[-1]['cause']}", flush=True)
        else:
            print(f"{fault.name} at step {drill.step()}: between two attempts, no incident", flush=True)
    codes = drill.finish(1200)
    drill.clean()
    assert_same_run(reference, drill.run_dir)
    parts = drill.events("goodput")[-1]["seconds"]
    wall, restarts = sum(parts.values()), len(drill.events("restart"))
    saves = drill.events("checkpoint")
    stall, delay = (sum(save[key] for save in saves) / len(saves) for key in ("stall_seconds", "seconds"))
    seconds = [json.loads(line)["seconds"] for line in (reference / "metrics.jsonl").read_text().splitlines()][1:]
    step = sum(sum(line.values()) for line in seconds) / (5 * len(seconds))
    down = sum(detections) / len(detections) + (parts["recovering"] + parts["waiting"]) / max(1, restarts)
    formula = expected_goodput(10 * step, stall, wall / struck, down, delay)
    good = parts["productive"] / wall
    print(f"codes {codes}, {struck} faults, {restarts} restarts, same bits; {json.dumps(parts)}")
    print(
        f"goodput {good:.1%}, Daly's formula {formula:.1%}: a fault every {wall / struck:.0f} s, {down:.1f} s down each"
    )
    claim = f"goodput of {options.hosts} hosts under a fault every {wall / struck:.0f} s"
    note = f"{struck} faults of hosts and links, {down:.1f} s down for each; same bits as one undisturbed host"
    record.add(claim, "%", 100 * good, peer="Daly's formula", peer_values=100 * formula, note=note)
    record.write()


def drill_is_over(drill: Drill) -> bool:
    """Return True if every command has ended."""
    return all(process.poll() is not None for process in drill.processes.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--layout", choices=LAYOUTS, default="tp2 dp")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", nargs="*", help="names of faults, or parts of them")
    parser.add_argument("--phases", nargs="*", default=["steps"], choices=PHASES)
    parser.add_argument("--random", type=int, default=0, help="so many random faults at random steps instead")
    parser.add_argument("--storm", type=int, default=0, help="so many faults in one run, about one a minute")
    parser.add_argument("--seed", type=int, default=0)
    options, record = parser.parse_args(), Recorder(__file__, "recovery.md")
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{options.layout.replace(' ', '-')}-{options.steps}.yaml"
    text = RECIPE.format(text=options.text.absolute(), folder=folder, steps=options.steps) + LAYOUTS[options.layout]
    (folder / name).write_text(text)
    results = []
    with net_hosts(folder / "net", options.hosts) as hosts:

        def drill(name: str) -> Drill:
            return Drill(hosts, folder, name, options.layout, options.hosts, options.steps)

        reference = folder / "runs" / f"reference-{options.layout.replace(' ', '-')}-{options.hosts}-{options.steps}"
        words = [str(folder / name), f"run.dir={reference}", "--nproc", str(2 * options.hosts)]
        subprocess.run([sys.executable, "-m", "hlat", "train", *words], check=True, stdout=subprocess.DEVNULL)
        if options.storm:
            storm(drill(f"storm-{options.seed}-{time.time():.0f}"), reference, options, record)
            return
        for number, (fault, phase, step) in enumerate(plan(options)):
            one = drill(f"drill-{options.hosts}-{options.seed}-{time.time():.0f}-{number}")
            try:
                seen = carry_out(one, reference, fault, phase, step)
            except TimeoutError as error:
                seen = {"fault": fault.name, "phase": phase, "same": False, "right": False, "blamed": [str(error)]}
            finally:
                one.clean()
            results.append(seen)
            print(json.dumps(seen), flush=True)
    summarize(results, options, record)


def plan(options: argparse.Namespace) -> list[tuple[Fault, str, int]]:
    """Faults, phases and steps to carry out."""
    known = faults(options.hosts)
    if options.random:
        draw = random.Random(options.seed)
        phases = [*["steps"] * 4, "save", "validation", "start"]
        chosen = [(draw.choice(sorted(known)), draw.choice(phases)) for _ in range(options.random)]
        return [
            (known[name], phase, PHASES[phase][1] if phase != "steps" else draw.randrange(1, options.steps - 8))
            for name, phase in chosen
        ]
    chosen = [fault for name, fault in known.items() if not options.only or any(part in name for part in options.only)]
    return [(fault, phase, PHASES[phase][1]) for phase in options.phases for fault in chosen]


def summarize(results: list[dict], options: argparse.Namespace, record: Recorder) -> None:
    """Print a table, and record the numbers."""
    for seen in results:
        seconds = "-" if seen.get("seconds") is None else f"{seen['seconds']:.1f} s"
        verdict = "same bits" if seen["same"] else "DIFFERS"
        print(f"{seen['fault']} in {seen['phase']}: {seconds}, {verdict}, {'; '.join(seen['blamed']) or 'no incident'}")
    where = f"{options.hosts} hosts of 2 processes, {options.layout}, hang_seconds 20"
    what = "random faults" if options.random else "faults"
    wrong = sum(not seen["same"] for seen in results)
    record.add(
        f"{what} of hosts: runs that differ from an undisturbed one ({where})", "runs", wrong, note=f"of {len(results)}"
    )
    times = [seen["seconds"] for seen in results if seen.get("seconds") is not None]
    if times:
        record.add(
            f"{what} of hosts: longest time to detection ({where})", "s", max(times), note=f"{len(times)} detected"
        )
    record.write()


if __name__ == "__main__":
    main()
