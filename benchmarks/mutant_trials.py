"""A mutant in a copy of the repository, and the tests that should notice it.

record of a mutant --> copy of the repository with it --pytest in its own process--> killed, survived, timed out
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mutant_places import ROOT, SOURCE, faulty

# file or folder -> the test files about it, the fastest first; the first pattern that matches is taken
NEAR: dict[str, str] = {
    "optim/base.py": "optim/test_adamw training/test_witness",
    "optim/schedules.py": "optim/test_adamw config/test_stages training/test_witness",
    "optim/adamw.py": "optim/test_adamw optim/test_adamw_bf16 optim/test_restart training/test_witness "
    "optim/test_kernels",
    "optim/": "optim/test_kernels optim/test_adamw_bf16 optim/test_restart",
    "data/samples/order.py": "data/samples/test_permutation training/test_witness data/samples/test_training_data "
    "data/samples/test_mixture data/samples/test_weights data/samples/test_packing",
    "data/samples/training_data.py": "data/samples/test_training_data data/samples/test_packing "
    "data/samples/test_weights",
    "data/samples/packed_rows.py": "data/samples/test_packing data/samples/test_weights "
    "data/samples/test_training_data",
    "data/samples/packing.py": "data/samples/test_packing data/samples/test_training_data data/samples/test_weights",
    "data/": "data/samples/test_training_data data/samples/test_packing data/samples/test_weights",
    "parallel/layout.py": "parallel/test_layout distributed/layouts/test_same_model "
    "distributed/layouts/test_communication training/test_witness",
    "parallel/stages/stage_layers.py": "parallel/test_layout distributed/memory/test_memory "
    "training/test_witness distributed/layouts/test_same_model",
    "parallel/device_support.py": "parallel/test_compile training/test_witness distributed/layouts/test_same_model",
    "parallel/stages/rank_memory.py": "parallel/test_layout distributed/memory/test_memory "
    "activation_checkpointing/test_budget training/test_witness distributed/layouts/test_same_model",
    "parallel/data_parallel.py": "training/test_witness distributed/layouts/test_norms "
    "distributed/layouts/test_same_model parallel/test_norms distributed/layouts/test_gradients "
    "distributed/layouts/test_communication distributed/memory/test_memory",
    "parallel/parallel_model.py": "training/test_witness training/test_step precision/test_modes "
    "distributed/layouts/test_same_model",
    "parallel/context_parallel.py": "distributed/layouts/test_same_model distributed/layouts/test_isolation",
    "parallel/": "training/test_witness distributed/layouts/test_same_model",
    "training/loop.py": "training/test_step training/test_witness training/runs/test_anomalous_runs",
    "training/step_metrics.py": "training/test_witness cli/test_story training/runs/test_anomalous_runs "
    "training/test_resume",
    "training/evaluation": "training/test_step training/test_witness",
    "training/batches.py": "training/test_prefetch training/test_witness training/runs/test_online_runs",
    "training/saving/checkpointing.py": "training/saving/test_checkpointing training/test_resume "
    "training/saving/test_tiers training/runs/test_anomalous_runs",
    "training/interruptions.py": "training/saving/test_checkpointing training/saving/test_tiers "
    "training/test_interruptions training/test_resume launch/test_local_processes "
    "training/test_witness training/runs/test_anomalous_runs",
    "training/start.py": "training/test_start training/test_witness training/test_resume "
    "training/runs/test_anomalous_runs",
    "training/process.py": "training/test_process "
    "resilience/test_fault_injection training/runs/test_anomalous_runs training/test_witness training/test_resume",
    "training/saving/corruption_check.py": "distributed/state/test_replica_check",
    "training/faulty_disk.py": "training/saving/test_checkpointing training/runs/test_faulty_text",
    "training/": "training/test_witness training/test_resume training/runs/test_anomalous_runs",
    "checkpoint/format/tensor_files.py": "checkpoint/protocol/test_store checkpoint/test_state "
    "checkpoint/test_resharding checkpoint/protocol/test_crash_points",
    "checkpoint/state.py": "checkpoint/test_state optim/test_restart checkpoint/test_resharding",
    "checkpoint/stored_model.py": "checkpoint/test_export training/test_witness checkpoint/protocol/test_store "
    "checkpoint/protocol/test_damage checkpoint/format/test_hostile checkpoint/test_state",
    "checkpoint/saved_run.py": "checkpoint/test_tokenizer checkpoint/test_export checkpoint/test_resume_check",
    "checkpoint/protocol/store.py": "checkpoint/protocol/test_retry training/saving/test_checkpointing "
    "checkpoint/protocol/test_store checkpoint/protocol/test_damage checkpoint/format/test_hostile "
    "checkpoint/test_state",
    "checkpoint/staging_buffer.py": "checkpoint/background/test_staging_buffer checkpoint/background/test_async_saver",
    "checkpoint/async_saver.py": "checkpoint/background/test_async_saver checkpoint/background/test_saving_processes "
    "training/saving/test_checkpointing",
    "checkpoint/snapshots.py": "checkpoint/test_snapshots training/saving/test_tiers",
    "checkpoint/protocol/rank_parts.py": "checkpoint/test_snapshots training/saving/test_tiers "
    "checkpoint/protocol/test_store checkpoint/test_resharding checkpoint/format/test_hostile",
    "checkpoint/tiers.py": "training/saving/test_tiers checkpoint/test_snapshots checkpoint/test_remote_tier",
    "checkpoint/run_id.py": "checkpoint/test_snapshots checkpoint/test_remote_tier training/saving/test_tiers",
    "checkpoint/remote_tier.py": "checkpoint/test_remote_tier checkpoint/test_remote_damage",
    "checkpoint/object_store.py": "checkpoint/test_remote_tier",
    "checkpoint/inventory.py": "checkpoint/test_remote_damage cli/test_checkpoint_verbs "
    "checkpoint/protocol/test_store checkpoint/protocol/test_damage checkpoint/format/test_hostile "
    "checkpoint/test_state",
    "checkpoint/format/index.py": "checkpoint/format/test_hostile checkpoint/protocol/test_store "
    "checkpoint/protocol/test_damage checkpoint/test_state",
    "checkpoint/protocol/commit.py": "checkpoint/protocol/test_commit_of_ranks checkpoint/protocol/test_crash_points "
    "checkpoint/protocol/test_store",
    "checkpoint/format/filesystem.py": "checkpoint/protocol/test_store checkpoint/protocol/test_crash_points "
    "checkpoint/protocol/test_hlat_saving_defects",
    "checkpoint/": "checkpoint/protocol/test_store checkpoint/protocol/test_damage checkpoint/format/test_hostile "
    "checkpoint/test_state",
    **dict.fromkeys(
        ("launch/hosts/", "launch/hosts_job.py", "launch/supervision/"),
        "launch/hosts/test_agreement launch/hosts/test_host_options launch/hosts/test_survival",
    ),
    "launch/preflight/": "launch/preflight/test_meeting launch/preflight/test_checks launch/preflight/test_injected "
    "launch/preflight/test_hosts",
    "launch/schedulers/kubernetes.py": "launch/schedulers/test_kubernetes",
    "launch/schedulers/slurm.py": "launch/schedulers/test_slurm launch/schedulers/test_kubernetes",
    "launch/run_request.py": "launch/schedulers/test_slurm launch/schedulers/test_kubernetes",
    "launch/metrics_": "launch/test_metrics_server launch/test_served_runs",
}

# room -> tests that run with --wide if those above did not notice
WIDE: dict[str, str] = {
    "optim": "optim training/test_witness distributed/layouts/test_rounding precision checkpoint/test_state",
    "parallel": "parallel distributed/layouts/test_norms distributed/layouts/test_rounding "
    "distributed/layouts/test_isolation distributed/memory/test_activation_checkpointing "
    "distributed/memory/test_planned distributed/state/test_checkpoints distributed/memory/test_memory "
    "distributed/layouts/test_published_layouts planner/cost/test_pipeline_sim rehearsal evaluation "
    "activation_checkpointing",
    "training": "training cli/test_story tracking quickstart distributed/test_train "
    "distributed/state/test_replica_check distributed/state/test_anomalies faults/test_elastic "
    "faults/test_supervision launch/test_local_processes",
    "checkpoint": "checkpoint cli/test_checkpoint_verbs training/test_resume training/saving/test_checkpointing "
    "training/saving/test_tiers distributed/state/test_checkpoints distributed/state/test_snapshots "
    "faults/test_corruption",
    "launch": "launch api/test_train documentation/test_reference",
    "data": "data/samples/test_permutation data/samples/test_mixture data/samples/test_training_data "
    "data/samples/test_packing data/samples/test_weights data/test_file_list data/online/test_online "
    "data/tokenizers/test_safe_cuts training/runs/test_mixed_runs training/test_prefetch cli/test_data_verbs "
    "training/test_witness",
}


class Copy:
    """A copy of the repository; one mutant at a time is put in and taken out again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written = 1_000_000_000  # seconds of a file's time: compiled files are distinguished by it
        for name in git("ls-files", "-co", "--exclude-standard").splitlines():
            if (ROOT / name).is_file() and not name.startswith(("benchmarks/results/", "benchmarks/raw/")):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, folder / name)

    def try_(self, record: dict[str, Any], seconds: float, wide: bool) -> dict[str, Any]:
        """Status of a mutant, the test that killed it, and seconds."""
        file, original = self.folder / SOURCE / record["file"], (ROOT / SOURCE / record["file"]).read_bytes()
        changed = faulty(record, original)
        if changed is None:
            return {"status": "stale", "by": None}
        begun = time.monotonic()
        self._write(file, changed)
        try:
            found = self._noticed(record, seconds, wide)
        finally:
            self._write(file, original)
        return found | {"seconds": round(time.monotonic() - begun, 1)}

    def _noticed(self, record: dict[str, Any], seconds: float, wide: bool) -> dict[str, Any]:
        near = near_tests(record["file"])
        stages = [near]
        if wide:
            stages.append([name for name in test_files(WIDE[record["room"]]) if name not in near])
        for tests in stages:
            code, output = self._pytest(tests, seconds)
            if code in (124, 137):
                return {"status": "timed out", "by": _last_test(output)}
            if code in (4, 5):
                sys.exit(f"{' '.join(tests)}:\n{output}")
            if code:
                named = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
                return {"status": "killed", "by": named[0] if named else output[-300:]}
        return {"status": "survived", "by": None}

    def _pytest(self, tests: list[str], seconds: float) -> tuple[int, str]:
        limited = ["timeout", "--kill-after=10", f"{seconds:.0f}"]
        command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-v", "-p", "no:cacheprovider", "--tb=line"]
        environment = os.environ | {"PYTHONPATH": str(self.folder / "src"), "CI": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # what is compiled once serves every mutant
        result = subprocess.run(
            [*limited, *command, *tests],
            cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", check=False,
        )  # fmt: skip
        return result.returncode, result.stdout

    def _write(self, file: Path, content: bytes) -> None:
        file.write_bytes(content)
        self._written += 1
        os.utime(file, (self._written, self._written))


def near_tests(file: str) -> list[str]:
    """Test files about a source file."""
    return test_files(next(tests for pattern, tests in NEAR.items() if file.startswith(pattern)))


def test_files(names: str) -> list[str]:
    """Paths of test files and folders."""
    return [f"tests/{name}" if (ROOT / "tests" / name).is_dir() else f"tests/{name}.py" for name in names.split()]


def _last_test(output: str) -> str:
    return ([line.split()[0] for line in output.splitlines() if "::" in line] or ["none"])[-1]


def git(*words: str) -> str:
    """Output of a git command in this repository."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout
