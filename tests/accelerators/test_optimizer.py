"""The compiled update of bf16 weights on the stand-in: the bits of the plain one on the CPU, one launch per chunk."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hlat.optim import adamw_reference as reference
from hlat.optim.adamw import kernel_for
from tests.optim.test_kernels import KEYS, WRITTEN, operands, state
from tests.support.neuron.running import on_neuron

CHUNKS, LINES, LENGTH = 3, 4, 130  # the last chunk has half the lines


def move(given: reference.Operands, device: str) -> reference.Operands:
    """Copies of operands on a device."""
    tensors = {name: value.to(device) for name, value in vars(given).items() if isinstance(value, torch.Tensor)}
    tables = {name: table.to(device) for name, table in vars(given.addresses).items() if name != "length"}
    return replace(given, **tensors, addresses=replace(given.addresses, **tables))


def update_both(rounding: str, gradient: torch.dtype) -> tuple[list[str], dict[str, int]]:
    """Update the same operands on the CPU and on the device, twice: tensors that differ, and launches of a step."""
    from tests.support.neuron.device_module import counts  # noqa: PLC0415

    reference._DEVICE_CHUNK = LINES * LENGTH
    plain = operands(rounding, gradient, CHUNKS * LINES - LINES // 2, LENGTH, seed=5)
    device, kernel = move(plain, "neuron"), kernel_for(torch.device("neuron"))
    for step in range(2):
        reference.update([plain], KEYS + step, rounding)
        keys_2N = (KEYS + step).to("neuron")
        counts()
        kernel([device], keys_2N, rounding)
    launched = counts()["kinds"]
    pairs = zip(WRITTEN, state(plain), state(move(device, "cpu")), strict=False)
    return [name for name, mine, theirs in pairs if not torch.equal(mine, theirs)], launched


@pytest.mark.parametrize(
    ("rounding", "gradient"),
    [
        ("bf16-sr", torch.float32),
        ("bf16-kahan", torch.bfloat16),
        *(pytest.param(each, torch.bfloat16, marks=pytest.mark.slow) for each in reference.ROUNDINGS),
    ],
)
def test_the_compiled_update_has_the_bits_of_the_plain_one(
    rounding: str, gradient: torch.dtype, tmp_path: Path
) -> None:
    environment = {"TORCH_NEURONX_NEFF_CACHE_DIR": str(tmp_path)}
    differing, launched = on_neuron(update_both, rounding, gradient, env=environment)[0]
    assert not differing
    assert launched.pop("graph") == CHUNKS
    assert set(launched) <= {"aten::as_strided"}, "nothing else but views of chunks"
