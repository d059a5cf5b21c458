"""Times of single operations add up to those of the layers that the step time is made of."""

from dataclasses import replace

import numpy as np
import pytest

from hlat.hardware import load_catalog, parse_cluster
from hlat.planner.cost.calibration import load_constants
from hlat.planner.cost.comm_time import comm_times
from hlat.planner.cost.compute_time import compute_times
from hlat.planner.cost.step_time import OperationTimes
from hlat.planner.problem.layouts import parse_layout
from hlat.planner.problem.question import PlanQuestion
from hlat.planner.problem.request import resolve_request
from hlat.planner.problem.workload import block_products
from hlat.planner.search import workload_columns

QUESTION = PlanQuestion("llama-2-7b", precision="mixed")
LAYOUTS = ("tp=8,pp=1,zero=1,ckpt=full", "tp=1,pp=1,zero=3", "tp=4,pp=2,zero=1")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operations_of_a_layer_add_up_to_it(layout: str) -> None:
    request = resolve_request(QUESTION, parse_cluster("p5.48xlarge:2", load_catalog()))
    columns = workload_columns(request, [parse_layout(layout, request)])
    compute, times = compute_times(columns, load_constants()), OperationTimes.of(columns)
    tokens = float(columns.tokens[0])
    shapes = [(tokens, float(rows[0]), float(width[0])) for rows, width in block_products(columns)]
    forward = [(1, m, n, k) for m, n, k in shapes]
    backward = [(1, m, k, n) for m, n, k in shapes] + [(1, k, n, m) for m, n, k in shapes]
    products = times.products(np.array([*forward, *backward], dtype=np.float64), eight_bit=False).sum()
    attention = times.attention_forward + times.attention_backward
    others = times.others_forward + times.others_backward
    if "full" in layout:  # backward has the other kernels of the recomputed forward pass too
        others -= times.others_forward
    layer = float((compute.forward + compute.backward)[0])
    assert products + attention + others == pytest.approx(layer, rel=0.01), "the host adds nothing: products are large"


def test_a_message_of_the_tensor_axis_is_timed_as_in_a_layer() -> None:
    request = resolve_request(QUESTION, parse_cluster("p5.48xlarge:2", load_catalog()))
    columns = workload_columns(request, [parse_layout("tp=8,pp=1", request)])
    times, hidden = OperationTimes.of(columns), float((2 * columns.tokens * columns.hidden)[0])
    halves = times.tensor_halves(np.array([hidden, hidden / 2, hidden * 4]))
    assert 2 * halves[0] == pytest.approx(float(comm_times(columns, load_constants()).tensor[0]))
    assert halves[0] / 2 < halves[1] < halves[0] and halves[2] < 4 * halves[0], "latency counts once"


def test_slower_links_take_longer() -> None:
    request = resolve_request(QUESTION, parse_cluster("p5.48xlarge:2", load_catalog()))
    instance = request.cluster.instance.model_copy(update={"link": request.cluster.instance.link / 2})
    slow = replace(request, cluster=replace(request.cluster, instance=instance))
    fast, slower = (
        OperationTimes.of(workload_columns(one, [parse_layout("tp=8,pp=1", one)])) for one in (request, slow)
    )
    size = np.array([1e8])
    assert slower.tensor_halves(size)[0] > 1.3 * fast.tensor_halves(size)[0]
    assert slower.products(np.array([[1.0, 512, 512, 512]]), False) == fast.products(
        np.array([[1.0, 512, 512, 512]]), False
    )
