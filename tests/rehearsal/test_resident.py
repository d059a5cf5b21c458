"""Rehearsed memory against the resident memory of a real process."""

import subprocess
import sys

import pytest

from hlat.rehearsal import rehearse
from tests.support.rehearsal.small_recipes import recipe_of

WIDE = {
    "model": {"layers": 8, "hidden_size": 512, "intermediate_size": 1408, "heads": 8, "max_sequence_length": 1024},
    "data": {"sequence_length": 1024},
    "batch": {"global_batch": 4, "micro_batch": 2},
}
MIB = 1 << 20

# Large allocations use mmap and are returned when freed, so that resident memory is live memory.
SCRIPT = """
import ctypes, json, sys
import torch
from hlat.config.load import parse_recipe
from hlat.data.samples.training_data import Batch
from hlat.optim import build_optimizer
from hlat.parallel import build_parallel
from hlat.runtime.backend.device import peak_memory_bytes
from hlat.runtime.distributed.join import Runtime
from hlat.training import accumulate_gradients, update

def train(content, steps):
    recipe, runtime = parse_recipe(content, world=1), Runtime(torch.device("cpu"))
    model = build_parallel(recipe, runtime, 3)
    optimizer = build_optimizer(model.local_parameters, recipe.optimizer, recipe.precision.mode, 3)
    tokens = torch.zeros((recipe.batch.global_batch, recipe.data.sequence_length), dtype=torch.int64)
    for step in range(1, steps + 1):
        update(model, optimizer, recipe, step, accumulate_gradients(model, Batch(tokens, tokens, None)))

ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD, glibc
torch.set_num_threads(1)
wide, small = json.loads(sys.argv[1]), json.loads(sys.argv[2])
train(small, 1)  # loads libraries
before = peak_memory_bytes(torch.device("cpu"))
train(wide, 2)
print(peak_memory_bytes(torch.device("cpu")) - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "policy"), [("fp32", "none"), ("fp32", "full"), ("mixed", "selective"), ("bf16-sr", "none")]
)
def test_the_peak_of_a_process_matches_the_rehearsal(mode: str, policy: str) -> None:
    """Within 8 %, at a peak many times larger than the additional memory of kernels and allocator."""
    choice = {"precision": {"mode": mode}, "memory": {"activation_checkpointing": policy}}
    wide, small = recipe_of(1, **WIDE, **choice), recipe_of(1, **choice)
    (report,) = rehearse(wide, 1).ranks
    contents = [recipe.model_dump_json() for recipe in (wide, small)]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *contents], capture_output=True, text=True, check=True)
    rise = int(done.stdout)
    assert report.peak_bytes > 200 * MIB
    assert abs(rise / report.peak_bytes - 1) < 0.08, (rise / MIB, report.peak_bytes / MIB)
