"""The time model: it agrees with the FLOP counts, its components add up, and slower choices are predicted slower."""

from dataclasses import replace

import numpy as np
import pytest

from hlat.config import PRESETS
from hlat.config.sections.model import ModelConfig
from hlat.model.counts import count_parameters, forward_flops_per_token
from hlat.planner.cost.calibration import load_constants
from hlat.planner.cost.comm_time import comm_times
from hlat.planner.cost.compute_time import compute_times
from hlat.planner.cost.program import hlat_profile
from hlat.planner.cost.step_counts import exchanged_bytes, executed_flops
from hlat.planner.cost.step_time import STEP_COMPONENTS, step_times
from hlat.planner.problem.devices import cluster_device
from hlat.planner.problem.layouts import parse_layout
from hlat.planner.problem.workload import (
    FLASH_ATTENTION_1,
    MATERIALIZED_SCORES,
    DeviceSpec,
    ModelShape,
    SoftwareProfile,
    StepLayout,
    Workload,
    WorkloadColumns,
    layer_weights,
    rank_weights,
)
from hlat.planner.search import predict_layout
from tests.support.planner.requests import request_for

A100 = DeviceSpec("ampere", 312e12, 312e12, 0.869, 0.869, 80e9, 2.039e12, 300e9, 8, 200e9, 8)
LAYOUT = StepLayout(1, 1, 1, 8, 1, 1, 4, 1024, 4096, False, "none")
SHAPE = ModelShape(32, 4096, 32, 32, 128, 11008, 32000)


def seconds(shape=SHAPE, software=None, device=A100, **layout):
    workload = Workload(shape, replace(LAYOUT, **layout), software or SoftwareProfile(), device)
    return float(step_times(WorkloadColumns([workload])).step[0])


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-2-70b", "llama-3-8b", "llama-3-405b"])
def test_weight_counts_equal_those_of_the_model_package(name):
    model = ModelConfig.model_validate(PRESETS[name])
    shape = ModelShape(model.layers, model.hidden_size, model.heads, model.n_kv_heads, model.n_head_dim,
                  model.intermediate_size, model.vocab_size)  # fmt: skip
    columns = WorkloadColumns([Workload(shape, LAYOUT, SoftwareProfile(), A100)])
    counts = count_parameters(model)
    assert model.layers * layer_weights(columns)[0] == counts.attention + counts.feed_forward
    assert rank_weights(columns)[0] == counts.total - counts.norms


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_time_of_a_device_without_other_costs_is_executed_flops_over_rate(recompute):
    """Infinite memory and link rates, no gaps, no attention, aligned sizes: only FLOPs / rate remains.

    The FLOPs are those of the model package and the executed FLOPs of the planner, which rehearsals confirm.
    """
    request = request_for("llama-3-8b", "a100-80gb:1", sequence=4096, global_batch=1024)
    candidate = replace(parse_layout("tp=1,mbs=4", request), recompute=recompute)
    model = request.model
    shape = ModelShape(model.layers, 4096, 32, 8, 128, 14336, model.vocab_size)
    device = replace(A100, memory_rate=1e30, link_rate=1e30, network_rate=1e30)
    constants = load_constants().with_values(
        {("kernel", "all"): 0.0, ("host", "all"): 1e-30, ("second_flash", "ampere"): 1e15, ("hop", "all"): 0.0,
         ("collective", "all"): 0.0, ("straggling", "all"): 0.0}
    )  # fmt: skip
    software = SoftwareProfile(eager=False)
    layout = replace(LAYOUT, recompute=recompute)
    found = float(step_times(WorkloadColumns([Workload(shape, layout, software, device)]), constants).step[0])
    passes = 9 if recompute == "full" else 7  # forward, recomputation, and five in backward
    core = passes * 2 * 4096 * 4096 * 32 * 128 * model.layers * 128
    rate = 312e12 * 0.869 * load_constants().values["products", "ampere"]
    assert found == pytest.approx((executed_flops(request, candidate, 0) - core) / rate, rel=1e-6)
    if recompute == "none":
        causal = 4 * model.layers * 32 * 128 * (4096 + 1) / 2
        flops = 3 * (forward_flops_per_token(model, 4096) - causal) * 128 * 4096
        assert found == pytest.approx(flops / rate, rel=1e-6)


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tensor": 8, "data": 1, "sequence_parallel": True},
        {"pipeline": 4, "data": 2, "virtual": 2},
        {"zero": 3, "recompute": "full"},
        {"context": 2, "data": 4},
        {"tensor": 2, "pipeline": 2, "data": 2, "recompute": "selective"},
    ],
)
def test_components_add_up_to_the_step(layout):
    times = step_times(WorkloadColumns([Workload(SHAPE, replace(LAYOUT, **layout), SoftwareProfile(), A100)]))
    assert sum(getattr(times, name)[0] for name in STEP_COMPONENTS) == pytest.approx(times.step[0], rel=1e-9)
    assert min(getattr(times, name)[0] for name in STEP_COMPONENTS) >= -1e-12


def test_slower_layouts_and_software_are_predicted_slower():
    base = seconds()
    assert seconds(recompute="full") > seconds(recompute="selective") > base
    assert seconds(micro_batch=1) > base
    assert seconds(pipeline=8, data=1, micro_batch=1) > seconds(pipeline=8, data=1, micro_batch=1, virtual=2)
    assert (
        seconds(software=SoftwareProfile(attention=MATERIALIZED_SCORES))
        > seconds(software=SoftwareProfile(attention=FLASH_ATTENTION_1))
        > base
    )
    assert seconds(software=SoftwareProfile(overlaps_data=False)) > base
    assert seconds(device=replace(A100, network_rate=1e9), data=64) > seconds(data=64)
    # A tensor group that spans two nodes against one node with 16 devices, everything else equal.
    far = {"tensor": 16, "data": 4, "sequence_parallel": True}
    assert seconds(**far) > seconds(**far, device=replace(A100, domain=16, per_instance=16))


def test_a_batch_of_workloads_gives_the_same_times_as_each_alone():
    workloads = [Workload(SHAPE, replace(LAYOUT, tensor=t, data=8 // t), SoftwareProfile(), A100) for t in (1, 2, 4, 8)]
    together = step_times(WorkloadColumns(workloads)).step
    alone = [step_times(WorkloadColumns([workload])).step[0] for workload in workloads]
    assert np.array_equal(together, np.array(alone))


def test_formula_and_simulation_agree_on_a_pipeline():
    """The search ranks by the formula and reports the simulation, so they must agree."""
    request = request_for("llama-2-70b", "h100:16")
    shape = ModelShape(80, 8192, 64, 8, 128, 28672, 32000)
    device = cluster_device(request.cluster)
    for text in ("tp=8,pp=4,recompute=full", "tp=8,pp=8,recompute=full", "tp=8,pp=4,vpp=5,recompute=full"):
        prediction = predict_layout(request, parse_layout(text, request))
        software = hlat_profile(request, prediction.candidate)
        workload = Workload(shape, prediction.candidate.step_layout(request), software, device)
        by_formula = float(step_times(WorkloadColumns([workload])).step[0])
        assert prediction.step_seconds == pytest.approx(by_formula, rel=0.05)


@pytest.mark.parametrize(
    ("ranks", "mebibytes", "microseconds"),
    [
        (2, 1, 44.2), (2, 8, 86.9), (2, 32, 230.0), (2, 128, 763.6),
        (4, 1, 51.4), (4, 8, 116.8), (4, 32, 284.2), (4, 128, 998.6),
        (8, 1, 92.8), (8, 8, 134.3), (8, 32, 358.1), (8, 128, 1162.0),
    ],
)  # fmt: skip
def test_all_reduce_times_on_a100_match_measurements(ranks, mebibytes, microseconds):
    """Measured by nccl-tests over NVSwitch (VIA-Research/vTrain, trace/a100). Neighbouring sizes differ by 13 %."""
    tokens = mebibytes * (1 << 20) // (2 * 4096)
    layout = replace(LAYOUT, tensor=ranks, data=1, micro_batch=tokens / 1024, sequence=1024)
    found = comm_times(WorkloadColumns([Workload(SHAPE, layout, SoftwareProfile(), A100)]), load_constants()).tensor[0]
    assert found == pytest.approx(microseconds * 1e-6, rel=0.15)


@pytest.mark.parametrize(("zero", "pipeline"), [(1, 1), (2, 1), (3, 1), (1, 2), (3, 2)])
def test_data_parallel_time_is_bytes_over_bandwidth(zero, pipeline):
    """The time model agrees with the exchanged bytes, which rehearsals confirm. ZeRO 2 and 3 send for each micro-batch.

    Within 5 %: the bytes leave out what embedding and head need not gather twice, 4 % of the weights.
    """
    request = request_for("llama-2-7b", "p5.48xlarge:2", sequence=4096, global_batch=128)
    candidate = parse_layout(f"pp={pipeline},zero={zero}", request)
    device = replace(A100, link_rate=1.0, network_rate=1e30, memory_rate=1e30, domain=64)
    constants = load_constants().with_values({("link", "all"): 1.0, ("hop", "all"): 0.0, ("collective", "all"): 0.0})
    shape = ModelShape(32, 4096, 32, 32, 128, 11008, 32000)
    software = SoftwareProfile(overlaps_data=False)
    columns = WorkloadColumns([Workload(shape, candidate.step_layout(request), software, device)])
    seconds = float(step_times(columns, constants).data[0])
    sent = (candidate.data - 1) / candidate.data * exchanged_bytes(request, candidate, 0)["data"]
    assert seconds == pytest.approx(sent, rel=0.05)


def test_fp32_products_run_at_the_fp32_rate():
    """An H100 reaches 67 TFLOP/s in fp32: no plan may exceed that."""
    request = request_for("llama-3-8b", "p5.48xlarge:1", precision="fp32", sequence=4096, global_batch=8)
    prediction = predict_layout(request, parse_layout("tp=8,zero=0,recompute=full", request))
    assert executed_flops(request, prediction.candidate, 0) / prediction.step_seconds < 66.9e12
    assert prediction.mfu < 1


def columns(software=None, device=A100, **layout):
    return WorkloadColumns([Workload(SHAPE, replace(LAYOUT, **layout), software or SoftwareProfile(), device)])


def test_context_ranks_exchange_keys_and_values():
    """Two tensors in 16 bits, of the tokens of the other ranks, at full link rate, with a latency per step."""
    free = {("link", "ampere"): 1.0, ("hop", "all"): 0.0, ("collective", "all"): 0.0, ("passage", "all"): 1e30}
    constants = load_constants().with_values(free)
    hop, start = 3e-6, 20e-6
    late = constants.with_values({("hop", "all"): hop, ("collective", "all"): start})
    for context in (2, 4):
        sent = (context - 1) * 2 * 2 * 4 * 4096 / context * 32 * 128 / 300e9
        workload = columns(context=context, data=1)
        assert comm_times(workload, constants).context[0] == pytest.approx(sent)
        expected = sent + (context - 1) * hop + start  # one gather
        assert comm_times(workload, late).context[0] == pytest.approx(expected)


@pytest.mark.parametrize(("recompute", "exchanges"), [("none", 2), ("selective", 3), ("full", 3)])
def test_gathered_keys_and_values_are_waited_for(recompute, exchanges):
    """As many as a rehearsal counts (planner/cost/step_counts.py): forward, backward, and again if freed."""
    workloads = columns(context=2, data=4, recompute=recompute)
    once = comm_times(workloads, load_constants()).context[0]
    assert step_times(workloads).context[0] == pytest.approx(exchanges * 32 * workloads.micro_batches[0] * once)


def test_the_embedding_delays_the_first_stage():
    """The gradient of the whole table is zeroed for each micro-batch, and added to the sums after the first one."""
    one, large = (columns(pipeline=8, data=1, virtual=1), replace(SHAPE, vocab=512_000))
    more = WorkloadColumns([Workload(large, replace(LAYOUT, pipeline=8, data=1), SoftwareProfile(), A100)])
    rate = A100.memory_rate * load_constants().values["memory", "all"]
    added = 1 - 1 / one.micro_batches[0]
    extra = compute_times(more, load_constants()).embedding[0] - compute_times(one, load_constants()).embedding[0]
    assert extra == pytest.approx((512_000 - 32_000) * 4096 * (2 + added * (2 + 2 * 4)) / rate)
    sharded = columns(zero=3)
    tokens = 4 * 4096
    assert compute_times(sharded, load_constants()).embedding[0] == pytest.approx(
        (8 * tokens * 4096 + 2 * 32_000 * 4096) / rate
    )


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gathering_inputs_again_takes_the_time_of_two_more_messages(recompute):
    """A layer has eight gathers and scatters; full recomputation repeats gathers anyway."""
    kept, again = (columns(tensor=8, data=1, recompute=recompute, gathers_again=each) for each in (False, True))
    found, more = step_times(kept), step_times(again)
    expected = 1.0 if recompute == "full" else 10 / 8
    assert more.tensor == pytest.approx(expected * found.tensor)
    assert (more.step > found.step) == (recompute != "full")


def test_zero_divides_the_optimizer_step_over_the_ranks():
    whole, shared = (step_times(columns(zero=zero)).optimizer[0] for zero in (0, 1))
    assert whole == pytest.approx(8 * shared)


def test_backward_casts_twice_as_much_as_forward():
    device, eight = replace(A100, peak_eight_bit=624e12), SoftwareProfile(eight_bit=True)
    none, some = (
        compute_times(columns(eight, device), load_constants().with_values({("casts", "all"): share}))
        for share in (1e-9, 1.0)
    )
    assert (some.backward - none.backward)[0] == pytest.approx(2 * (some.forward - none.forward)[0])


def test_hidden_communication_slows_what_hides_it_and_the_ends_are_exposed():
    """Exposed are at least embedding, head and a block, once gathered and once reduced, and a share of all others."""
    shape = columns(zero=3, data=8)
    comm = comm_times(shape, load_constants())
    weights, block = rank_weights(shape)[0], layer_weights(shape)[0]
    share = (weights - 31 * block) / weights
    free, slowed = (load_constants().with_values({("contention", "all"): value}) for value in (0.0, 0.25))
    least, found = (step_times(shape, one).data[0] for one in (free, slowed))
    gather, reduce = float(comm.gather[0]), float(comm.reduce[0])
    ends, sent = share * (gather + reduce), float(shape.micro_batches[0]) * (2 * gather + reduce)
    assert ends <= least < 1.1 * ends  # what is not hidden of the passes is short
    assert found - least == pytest.approx(0.25 * (sent - least))
