"""Peak memory of a process: a policy that saves fewer activations lowers it by as many bytes."""

import subprocess
import sys

import pytest

from hlat.activation_checkpointing import POLICIES
from hlat.config.sections.model import ModelConfig
from hlat.model.activations import activation_bytes

WIDE = {"vocab_size": 64, "layers": 8, "hidden_size": 256, "intermediate_size": 1024, "heads": 4, "kv_heads": 2}
LENGTH = 1536
MIB = 1 << 20

# Large allocations are mapped and returned to the system, so that the peak is that of live tensors.
SCRIPT = f"""
import ctypes, sys
import torch
from hlat.config.sections.model import ModelConfig
from hlat.activation_checkpointing import POLICIES, checkpoint_activations
from hlat.activation_checkpointing.plan import ActivationPlan
from hlat.model import build
from hlat.runtime.backend.device import peak_memory_bytes
ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD, glibc
torch.set_num_threads(1)
config = ModelConfig(**{WIDE!r})
model = build(config, device="cpu", seed=1)
checkpoint_activations(model, ActivationPlan(sys.argv[1], (POLICIES[sys.argv[1]],) * config.layers, 0, 1, 0))
warm = torch.zeros((1, 8), dtype=torch.int64)
model(warm, warm).backward()  # libraries, tables, gradients
before = peak_memory_bytes(torch.device("cpu"))
tokens = torch.zeros((1, {LENGTH}), dtype=torch.int64)
model(tokens, tokens).backward()
print(peak_memory_bytes(torch.device("cpu")) - before)
"""


def peak(policy: str) -> int:
    """Bytes by which a step raises the peak memory of a fresh process."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, policy], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow  # live bytes are counted in the default suite (test_kept_bytes.py)
def test_the_peak_falls_by_the_bytes_not_saved() -> None:
    """The difference is reduced by the recomputed tensors of one block; its gradients are alive in any case."""
    config = ModelConfig.model_validate(WIDE)
    counted = {name: activation_bytes(config, 1, LENGTH, "fp32", names) for name, names in POLICIES.items()}
    peaks = {name: peak(name) for name in POLICIES}
    for policy in ("selective", "full"):
        freed = counted["none"].total - counted[policy].total
        again = counted["none"].per_layer - counted[policy].per_layer
        fallen = peaks["none"] - peaks[policy]
        assert freed > 30 * MIB
        assert freed - again - 8 * MIB < fallen < freed + 8 * MIB, (policy, freed / MIB, fallen / MIB, peaks)
