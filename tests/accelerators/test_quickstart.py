"""The quickstart, whole, on the stand-in with every rule: tokenize, train, validate, sample, export, report.

Bound of losses. One update has taken the loss from ln(4096), that of equal chances, to its value at step 2. The device
rounds operands to bf16 elsewhere than the CPU does: 2^-9 relative, in 7 products of each of 4 blocks and the head's,
forward and backward. These 58 errors are independent, so a gradient, the update and the fall of the loss differ by
sqrt(58) * 2^-9 relative, of which the bound is three times: 4.5 % of the fall.
"""

import math
from pathlib import Path

import pytest

from tests.accelerators.conftest import losses
from tests.support.commands import hlat
from tests.support.neuron.running import counts_of, hlat_on_neuron

STEPS = 2
ERROR = 3 * math.sqrt(58) * 2.0**-9


@pytest.mark.slow
def test_the_quickstart_ends_with_the_losses_of_the_cpu(tmp_path: Path) -> None:
    words = ["quickstart", "--steps", str(STEPS), "--to"]
    ours = hlat_on_neuron(*words, str(tmp_path / "neuron"), "--verbose", counts=tmp_path / "counts")
    theirs = hlat(*words, str(tmp_path / "cpu"))
    assert (ours.returncode, theirs.returncode) == (0, 0), ours.stderr + theirs.stderr
    assert "mixed on neuron" in ours.stdout and "blocks: compiled" in ours.stdout
    assert (tmp_path / "neuron" / "hf" / "model.safetensors").is_file()
    for name in ("loss", "val_loss"):
        (one,), (other,) = losses(tmp_path / "neuron", name), losses(tmp_path / "cpu", name)
        assert abs(one - other) < ERROR * (math.log(4096) - other), name
    for step in counts_of(tmp_path / "counts", 0)[STEPS - 1 :]:
        assert (step["shapes"], step["fallbacks"], step["waits"]) == (0, 0, 1), step
