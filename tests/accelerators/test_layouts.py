"""Every axis of parallelism, precision, recomputation and compilation on the stand-in, with all rules but ``send``."""

import pytest

from hlat.runtime.backend.table import backend_of
from tests.accelerators.conftest import Runs
from tests.accelerators.test_training import assert_close, assert_steady

pytestmark = pytest.mark.slow

LAYOUTS = {
    "zero 0": (2, ["parallel.zero=0"]),
    "zero 2": (2, ["parallel.zero=2"]),
    "zero 3": (2, ["parallel.zero=3"]),
    "tensor": (2, ["parallel.tensor=2", "parallel.sequence=false"]),
    "sequence": (2, ["parallel.tensor=2"]),
    "context": (2, ["parallel.context=2"]),
    "pipeline": (2, ["parallel.pipeline=2"]),
    "tensor, pipeline and data": (8, ["parallel.tensor=2", "parallel.pipeline=2", "batch.micro_batch=2"]),
    "tensor and context": (4, ["parallel.tensor=2", "parallel.context=2"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_as_one_process_on_the_cpu(runs: Runs, layout: str) -> None:
    world, options = LAYOUTS[layout]
    name = layout.replace(" ", "-").replace(",", "")
    allow = ["send"] if "parallel.pipeline=2" in options else []
    run = runs.on_neuron(name, "--nproc", str(world), *options, allow=allow)
    assert_close(run, runs.on_cpu("cpu"), "fp32")
    for rank in range(world):
        assert_steady(runs.counts(name, rank))


@pytest.mark.parametrize("mode", ["mixed", "bf16-sr", "bf16-kahan"])
@pytest.mark.parametrize("recomputation", ["full", "selective"])
def test_a_precision_mode_with_recomputation(runs: Runs, mode: str, recomputation: str) -> None:
    options = [f"precision.mode={mode}", f"memory.activation_checkpointing={recomputation}"]
    run = runs.on_neuron(f"{mode}-{recomputation}", "--nproc", "2", *options)
    assert_close(run, runs.on_cpu(f"cpu-{mode}", f"precision.mode={mode}"), "bf16")
    assert_steady(runs.counts(f"{mode}-{recomputation}", 1))


def test_muon_in_one_process(runs: Runs) -> None:
    assert_close(runs.on_neuron("muon", "optimizer.kind=muon"), runs.on_cpu("cpu-muon", "optimizer.kind=muon"), "bf16")


@pytest.mark.parametrize("recomputation", ["none", "full", "selective"])
def test_blocks_are_compiled_by_default_with_the_devices_compiler(runs: Runs, recomputation: str) -> None:
    """One graph for all blocks in training, and one without gradients for validation."""
    assert backend_of("neuron").compile_backend == "neuron"
    name = f"compiled-{recomputation}"
    options = ["run.compile=auto", f"memory.activation_checkpointing={recomputation}"]
    run = runs.on_neuron(name, "--nproc", "2", *options)
    assert_close(run, runs.on_cpu("cpu"), "fp32")
    counts = runs.counts(name)
    assert [step["graphs"] for step in counts] == [1, 1, 1, 2, 2, 2]
    assert_steady(counts)


@pytest.mark.parametrize("layout", ["sequence", "tensor", "context", "tensor and context", "pipeline"])
def test_blocks_of_a_layout_are_compiled_by_default(runs: Runs, layout: str) -> None:
    """In one graph with its collectives; those of a stage of a pipeline likewise."""
    world, options = LAYOUTS[layout]
    name = f"compiled-{layout.replace(' ', '-')}"
    allow = ["send"] if layout == "pipeline" else []
    run = runs.on_neuron(name, "--nproc", str(world), "run.compile=auto", *options, allow=allow)
    assert_close(run, runs.on_cpu("cpu"), "fp32")
    for rank in range(world):
        counts = runs.counts(name, rank)
        assert [step["graphs"] for step in counts] == [1, 1, 1, 2, 2, 2]
        assert_steady(counts)
