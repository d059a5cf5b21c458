"""The table of precision modes matches the memory of a run; a mode that cannot run raises an error with the reason."""

import pytest
import torch

from hlat.config.load import parse_recipe
from hlat.optim import build_optimizer
from hlat.parallel import build_parallel
from hlat.precision import MODES
from hlat.runtime.distributed.join import Runtime
from hlat.runtime.errors import LaunchError

CPU = torch.device("cpu")


def recipe(mode: str):
    content = {
        "model": {"vocab_size": 96, "layers": 2, "hidden_size": 32, "intermediate_size": 96, "heads": 4, "kv_heads": 2},
        "data": {"path": "none", "sequence_length": 16, "tokenizer": {"train": "char"}},
        "batch": {"global_batch": 4, "micro_batch": 2},
        "training": {"steps": 9},
        "precision": {"mode": mode},
    }
    return parse_recipe(content)


@pytest.mark.parametrize("mode", ["fp32", "mixed", "bf16-sr", "bf16", "bf16-kahan"])
def test_bytes_per_parameter_equal_the_table(mode: str) -> None:
    model = build_parallel(recipe(mode), Runtime(CPU), seed=1)
    optimizer = build_optimizer(model.local_parameters, recipe(mode).optimizer, mode, 1)
    tokens = torch.randint(0, 96, (4, 17), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        loss = model.accumulate_gradients(tokens[:, :-1], tokens[:, 1:])
        assert loss.dtype == torch.float32
        gradients = [each.gradient for each in model.local_parameters]
        assert {gradient.dtype for gradient in gradients} == {MODES[mode].gradients}
        optimizer.step()
    assert {parameter.dtype for parameter in model.parameters} == {MODES[mode].weights}
    states = [tensor for entry in optimizer.state.values() for name, tensor in entry.items() if name != "step"]
    stored = sum(tensor.nbytes for tensor in [*model.parameters, *gradients, *states])
    assert stored == MODES[mode].bytes_per_parameter * sum(parameter.numel() for parameter in model.parameters)


def test_fp8_is_rejected_with_the_reason_where_it_cannot_run() -> None:
    with pytest.raises(LaunchError, match=r"fp8: torch has no fp8 products on a cpu device.*mixed"):
        build_parallel(recipe("fp8"), Runtime(CPU), seed=1)
