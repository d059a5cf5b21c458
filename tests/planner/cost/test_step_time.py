"""The time model: it counts the FLOPs of law 8, its parts add up, and it knows what is better than what."""

from dataclasses import replace

import numpy as np
import pytest

from hlat.config import PRESETS
from hlat.config.sections import ModelConfig
from hlat.model.derived import count_parameters, forward_flops_per_token
from hlat.planner.cost import STEP_COMPONENTS, exchanged_bytes, executed_flops, load_constants, step_times
from hlat.planner.cost.comm_time import comm_times
from hlat.planner.cost.compute_time import compute_times
from hlat.planner.cost.constants import load_priors, meanings
from hlat.planner.problem import (
    FLASH_ATTENTION_1,
    FLASH_ATTENTION_2,
    MATERIALIZED_SCORES,
    DeviceSpec,
    ModelShape,
    SoftwareProfile,
    StepLayout,
    Workload,
    WorkloadColumns,
    layer_weights,
    parse_layout,
    rank_weights,
)
from hlat.planner.problem.devices import cluster_device
from hlat.planner.search.search import predict_layout
from tests.support.planner.questions import question

A100 = DeviceSpec("ampere", 312e12, 312e12, 0.869, 0.869, 108, 80e9, 2.039e12, 300e9, 8, 200e9, 8)
SPLIT = StepLayout(1, 1, 1, 8, 1, 1, 4, 1024, 4096, False, "none")
SHAPE = ModelShape(32, 4096, 32, 32, 128, 11008, 32000)


def seconds(shape=SHAPE, software=None, device=A100, **split):
    work = Workload(shape, replace(SPLIT, **split), software or SoftwareProfile(), device)
    return float(step_times(WorkloadColumns([work])).step[0])


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-2-70b", "llama-3-8b", "llama-3-405b"])
def test_weights_are_those_of_the_model_room(name):
    model = ModelConfig.model_validate(PRESETS[name])
    shape = ModelShape(model.layers, model.hidden_size, model.heads, model.n_kv_heads, model.n_head_dim,
                  model.intermediate_size, model.vocab_size)  # fmt: skip
    columns = WorkloadColumns([Workload(shape, SPLIT, SoftwareProfile(), A100)])
    counts = count_parameters(model)
    assert model.layers * layer_weights(columns)[0] == counts.attention + counts.feed_forward
    assert rank_weights(columns)[0] == counts.total - counts.norms


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_device_that_only_multiplies_takes_the_flops_that_are_executed(recompute):
    """Infinite memory and links, no gaps, no attention, aligned sizes: what is left is FLOPs / rate.

    FLOPs are those of law 8: the model room's, and what the planner says is executed, which rehearsals have as well.
    """
    asked = question("llama-3-8b", "a100-80gb:1", sequence=4096, global_batch=1024)
    one = replace(parse_layout("tp=1,mbs=4", asked), recompute=recompute)
    model = asked.model
    shape = ModelShape(model.layers, 4096, 32, 8, 128, 14336, model.vocab_size)
    device = replace(A100, memory_rate=1e30, link_rate=1e30, network_rate=1e30, units=1)
    constants = load_constants().with_values(
        {("kernel", "all"): 0.0, ("host", "all"): 1e-30, ("second_flash", "ampere"): 1e15, ("hop", "all"): 0.0,
         ("collective", "all"): 0.0, ("straggling", "all"): 0.0, ("recomputed", "ampere"): 1.0}
    )  # fmt: skip
    software = SoftwareProfile(eager=False, early_stop=True)
    split = replace(SPLIT, recompute=recompute)
    found = float(step_times(WorkloadColumns([Workload(shape, split, software, device)]), constants).step[0])
    passes = 9 if recompute == "full" else 7  # forward, again, and five in backward
    core = passes * 2 * 4096 * 4096 * 32 * 128 * model.layers * 128
    rate = 312e12 * 0.869 * load_constants().values["products", "ampere"]
    assert found == pytest.approx((executed_flops(asked, one, 0) - core) / rate, rel=1e-6)
    if recompute == "none":
        causal = 4 * model.layers * 32 * 128 * (4096 + 1) / 2
        flops = 3 * (forward_flops_per_token(model, 4096) - causal) * 128 * 4096
        assert found == pytest.approx(flops / rate, rel=1e-6)


@pytest.mark.parametrize(
    "split",
    [
        {},
        {"tensor": 8, "data": 1, "sequence_parallel": True},
        {"pipeline": 4, "data": 2, "virtual": 2},
        {"zero": 3, "recompute": "full"},
        {"context": 2, "data": 4},
        {"tensor": 2, "pipeline": 2, "data": 2, "recompute": "selective"},
    ],
)
def test_the_parts_add_up_to_the_step(split):
    times = step_times(WorkloadColumns([Workload(SHAPE, replace(SPLIT, **split), SoftwareProfile(), A100)]))
    assert sum(getattr(times, name)[0] for name in STEP_COMPONENTS) == pytest.approx(times.step[0], rel=1e-9)
    assert min(getattr(times, name)[0] for name in STEP_COMPONENTS) >= -1e-12


def test_what_is_known_to_be_slower_is_slower():
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
    # A tensor group that leaves the node, everything else equal.
    far = {"tensor": 16, "data": 4, "sequence_parallel": True}
    assert seconds(**far) > seconds(**far, device=replace(A100, domain=16, per_instance=16))


def test_many_works_at_once_are_each_what_it_is_alone():
    works = [Workload(SHAPE, replace(SPLIT, tensor=t, data=8 // t), SoftwareProfile(), A100) for t in (1, 2, 4, 8)]
    together = step_times(WorkloadColumns(works)).step
    alone = [step_times(WorkloadColumns([work])).step[0] for work in works]
    assert np.array_equal(together, np.array(alone))


def test_formula_and_simulation_agree_on_a_pipeline():
    """The search ranks by one and reports the other: they must not tell different stories."""
    asked = question("llama-2-70b", "h100:16")
    for layout in ("tp=8,pp=4,recompute=full", "tp=8,pp=8,recompute=full", "tp=8,pp=4,vpp=5,recompute=full"):
        one = predict_layout(asked, parse_layout(layout, asked))
        columns = WorkloadColumns([Workload(ModelShape(80, 8192, 64, 8, 128, 28672, 32000), one.candidate.step_layout(asked),
                                SoftwareProfile(attention=FLASH_ATTENTION_2), cluster_device(asked.cluster))])  # fmt: skip
        assert one.step_seconds == pytest.approx(float(step_times(columns).step[0]), rel=0.05)


def test_every_constant_has_a_meaning_a_value_and_a_prior():
    values, priors = load_constants().values, load_priors()
    assert values.keys() == priors.keys()
    assert {name for name, _ in values} == meanings().keys()
    for key, prior in priors.items():
        assert prior.value > 0
        if prior.spread:
            # A fit may not carry a constant away from what is physically known of it.
            assert abs(np.log(values[key] / prior.value)) <= 2 * prior.spread, key


@pytest.mark.parametrize(
    ("ranks", "mebibytes", "microseconds"),
    [
        (2, 1, 44.2), (2, 8, 86.9), (2, 32, 230.0), (2, 128, 763.6),
        (4, 1, 51.4), (4, 8, 116.8), (4, 32, 284.2), (4, 128, 998.6),
        (8, 1, 92.8), (8, 8, 134.3), (8, 32, 358.1), (8, 128, 1162.0),
    ],
)  # fmt: skip
def test_all_reduces_of_a100_take_what_was_measured(ranks, mebibytes, microseconds):
    """Of nccl-tests over NVSwitch (VIA-Research/vTrain, trace/a100). Within 15 %: neighbouring sizes differ by 13 %."""
    tokens = mebibytes * (1 << 20) // (2 * 4096)
    split = replace(SPLIT, tensor=ranks, data=1, micro_batch=tokens / 1024, sequence=1024)
    found = comm_times(WorkloadColumns([Workload(SHAPE, split, SoftwareProfile(), A100)]), load_constants()).tensor[0]
    assert found == pytest.approx(microseconds * 1e-6, rel=0.15)


@pytest.mark.parametrize(("zero", "pipeline"), [(1, 1), (2, 1), (3, 1), (1, 2), (3, 2)])
def test_data_parallel_traffic_takes_the_time_of_its_bytes(zero, pipeline):
    """Law 8 between the time model and the bytes that rehearsals have: what ZeRO 2 and 3 send for every micro-batch.

    Within 5 %: the bytes leave out what the ends of the model need not gather twice, 4 % of its weights.
    """
    asked = question("llama-2-7b", "p5.48xlarge:2", sequence=4096, global_batch=128)
    one = parse_layout(f"pp={pipeline},zero={zero}", asked)
    device = replace(A100, link_rate=1.0, network_rate=1e30, memory_rate=1e30, domain=64)
    constants = load_constants().with_values({("link", "all"): 1.0, ("hop", "all"): 0.0, ("collective", "all"): 0.0})
    shape = ModelShape(32, 4096, 32, 32, 128, 11008, 32000)
    software = SoftwareProfile(overlaps_data=False)
    columns = WorkloadColumns([Workload(shape, one.step_layout(asked), software, device)])
    seconds = float(step_times(columns, constants).data[0])
    sent = (one.data - 1) / one.data * exchanged_bytes(asked, one, 0)["data"]
    assert seconds == pytest.approx(sent, rel=0.05)


def test_products_in_32_bits_take_the_rate_of_32_bits():
    """An H100 has 67 TFLOP/s there: no plan may be faster."""
    asked = question("llama-3-8b", "p5.48xlarge:1", mode="fp32", sequence=4096, global_batch=8)
    one = predict_layout(asked, parse_layout("tp=8,zero=0,recompute=full", asked))
    assert executed_flops(asked, one.candidate, 0) / one.step_seconds < 66.9e12
    assert one.mfu < 1


def columns(software=None, device=A100, **split):
    return WorkloadColumns([Workload(SHAPE, replace(SPLIT, **split), software or SoftwareProfile(), device)])


def test_context_ranks_send_keys_and_values_to_each_other():
    """2 tensors in 16 bits, of the others' tokens, over links at full speed; in backward twice as much."""
    constants = load_constants().with_values({("link", "ampere"): 1.0})
    for context in (2, 4):
        found = comm_times(columns(context=context, data=1), constants).context[0]
        assert found == pytest.approx((context - 1) * 2 * 2 * 4 * 4096 / context * 32 * 128 / 300e9)
    asked = columns(context=2, data=4)
    once = comm_times(asked, load_constants()).context[0]
    assert step_times(asked).context[0] == pytest.approx(3 * 32 * asked.micro_batches[0] * once)


def test_zero_shares_the_optimizers_step():
    whole, shared = (step_times(columns(zero=zero)).optimizer[0] for zero in (0, 1))
    assert whole == pytest.approx(8 * shared)


def test_casts_of_backward_are_two_for_each_of_forward():
    device, eight = replace(A100, peak_eight_bit=624e12), SoftwareProfile(eight_bit=True)
    none, some = (
        compute_times(columns(eight, device), load_constants().with_values({("casts", "all"): share}))
        for share in (1e-9, 1.0)
    )
    assert (some.backward - none.backward)[0] == pytest.approx(2 * (some.forward - none.forward)[0])
