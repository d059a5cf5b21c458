"""Words for recomputation: what they mean in which framework, and how much of a forward pass it repeats."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.hardware import load_catalog
from hlat.planner.problem.workload import WorkloadColumns
from published_runs.counted_memory import counted_bytes
from published_runs.program import run_steps
from published_runs.reader import Recomputation, find_framework, read_recompute
from published_runs.row import read_run

pytestmark = pytest.mark.slow  # no plan reads tables of runs: for who works on the reader

ROW = {
    "chip": "H100-SXM-80GB", "n_chips": "64", "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8",
    "head_dim": "128", "ffn": "14336", "gated_mlp": "1", "vocab": "128256", "seq_len": "4096", "global_batch": "64",
    "micro_batch": "1", "tp": "1", "pp": "1", "dp": "64", "zero_stage": "3", "framework": "torchtitan FSDP2",
    "activation_ckpt": "full", "precision": "bf16", "interconnect": "8x400 Gb/s per node", "compiled": "yes",
}  # fmt: skip
ALTERNATE = Recomputation("full", kept="alternate")


def read(**changes):
    return read_run(ROW | changes, load_catalog()).workload


def recomputed(*workloads):
    return run_steps(WorkloadColumns(list(workloads))).recomputed


@given(
    st.sampled_from(["{} selective", "Selective {}", "selective ({})", "selective-{}"]), st.sampled_from(["op", "ops"])
)
def test_operators_are_read_in_every_spelling(form, word):
    text = form.format("per op" if "{} " in form else word)
    assert read_recompute(text).value == ALTERNATE


@pytest.mark.parametrize(
    ("framework", "text", "meaning"),
    [
        ("torchtitan FSDP2", "selective", ALTERNATE),
        ("torchtitan FSDP2 + torch.compile", "Selective AC", ALTERNATE),
        ("torchtitan", "selective layer", Recomputation("full", 0.5)),
        ("torchtitan", "selective 4", Recomputation("full", 0.25)),
        ("Megatron-LM", "selective", Recomputation("selective")),
        ("Megatron-Core", "selective layer", Recomputation("selective")),
        ("NeMo 25.04", "selective (layer norm, MLP)", Recomputation("selective")),
        ("PyTorch FSDP", "selective (some of the blocks)", Recomputation("full", 0.5)),
        ("PyTorch FSDP", "selective", Recomputation("selective")),
    ],
)
def test_selective_means_what_the_framework_calls_so(framework, text, meaning):
    assert read_recompute(text, find_framework(framework).selective).value == meaning


@given(
    st.integers(1, 64),
    st.integers(1, 64),
    st.sampled_from(["{}/{}", "{} of {} layers", "{} out of {}", "{}/{} blocks"]),
)
def test_a_share_of_the_layers_is_that_share(some, more, form):
    text = form.format(some, some + more)
    assert read_recompute(text).value.layers == pytest.approx(some / (some + more))


@given(st.integers(1, 100))
def test_a_percentage_is_a_share_of_the_layers(percent):
    assert read_recompute(f"{percent}% of the layers").value.layers == pytest.approx(percent / 100)
    assert read_recompute(f"{percent} %").value.policy == "full"


def test_recomputed_time_is_in_proportion_to_the_layers():
    whole = read()
    shares = (0.25, 0.5, 1.0)
    some = [replace(whole, layout=replace(whole.layout, recomputed_layers=share)) for share in shares]
    quarter, half, all_of_them = recomputed(*some)
    assert half == pytest.approx(2 * quarter) and all_of_them == pytest.approx(4 * quarter)


def test_kept_results_are_not_computed_again():
    """Every second product: key, output and up of 4096 x (128 x 40 + 14336) of 4096 x (2 x 128 x 40 + 3 x 14336)."""
    alternate = read(activation_ckpt="selective").layout
    assert alternate.recomputed_products == pytest.approx((128 * 40 + 14336) / (2 * 128 * 40 + 3 * 14336))
    assert alternate.recomputed_attention == 0 and read().layout.recomputed_attention == 1
    every, second, none = recomputed(*(read(activation_ckpt=words) for words in ("full", "selective", "none")))
    assert every > 2 * second > none == 0


def test_what_does_not_fit_is_recomputed_if_nothing_is_stated():
    # 8B on 64 chips keeps 20 GB of state there, and 9 GB per sequence of 4,096 tokens without recomputation.
    stated = {"framework": "MaxText", "activation_ckpt": "", "micro_batch": ""}
    large, small = read(**stated, global_batch="1024"), read(**stated, global_batch="64")
    assert (large.layout.recompute, small.layout.recompute) == ("full", "none")
    readings = read_run(ROW | stated | {"global_batch": "1024"}, load_catalog()).readings
    said = next(one for one in readings if one.column == "activation_ckpt")
    assert said.sure == "assumed" and "does not fit" in said.reason
    assert read(**stated | {"activation_ckpt": "none"}, global_batch="1024").layout.recompute == "none", "stated"
    megatron = stated | {"framework": "Megatron-LM", "micro_batch": "16", "zero_stage": "1"}
    assert read(**megatron, global_batch="1024").layout.recompute == "none", (
        "what its pipelines keep is not known so well"
    )


def test_kept_results_take_memory():
    """Half of the layers keep half of the activations; results of products as much as they are of the products."""
    whole = read()
    policies = (
        replace(whole.layout, recompute="none"),
        replace(whole.layout, recomputed_products=0.5),
        replace(whole.layout, recomputed_layers=0.5),
        whole.layout,
    )
    columns = WorkloadColumns([replace(whole, layout=layout) for layout in policies])
    none, products, layers, every = counted_bytes(columns, np.full(len(policies), 4.0))
    assert every < products == layers < none + (products - every), "one layer at a time is computed again"
