"""Rules of the test device: the things that it refuses, or does in another way, as a Neuron device does.

Each rule holds unless a test allows what it forbids: ``HLAT_STAND_IN_ALLOWS=send,float64``. Sources are AWS's source of
torch-neuronx (the public beta of SDK 2.33) and its documentation, read in November 2026, and ports of other programs.
"""

import os

ALLOWS_ENV = "HLAT_STAND_IN_ALLOWS"

RULES = {
    # name -> what a device does
    "float64": "has no float64: eager operators cast it to float32 without a word (ports); here it is refused",
    "unsigned": "has no uint16, uint32 and uint64 (vllm-neuron lists them as unsupported)",
    "determinism": "torch's deterministic mode turns fused eager execution off (pytorch-native-overview.rst)",
    "fork": "the runtime cannot be used in a process that was forked after it was started (torch_neuronx/__init__.py)",
    "start-order": "init_process_group asserts that the runtime has not been started (distributed/backend.py)",
    "one-device": "a process of several may use one device, and no other index (NeuronDevice.cpp, set_device)",
    "local-index": "its index is the local rank, and device_count() the number of local ranks (NeuronDevice.cpp); "
    "if allowed otherwise: index 0 of 1, as with NEURON_RT_VISIBLE_CORES in other programs",
    "int64-collectives": "collectives have no int64: no collective data type of 8 bytes is documented",
    "barrier": "barrier works on the default group only, else NotImplementedError (distributed/backend.py)",
    "equal-splits": "all-to-all takes equal splits, and ranks that follow each other (distributed/backend.py)",
    "send": "there is no send and receive (distributed/backend.py); 2.33's documentation lists pipelines",
    "broadcast": "broadcast is zero and sum: -0.0 arrives as +0.0 (distributed/backend.py)",
    "groups": "groups are aligned: a regular pattern that tiles the world (ports; internode-collective-comm.rst)",
    "coalesced": "reduce_scatter_coalesced is not implemented; reduce_scatter_tensor_coalesced needs equal trailing "
    "shapes (distributed/backend.py)",
}


def holds(rule: str) -> bool:
    """Return True unless the environment allows what a rule forbids."""
    assert rule in RULES, rule
    return rule not in os.environ.get(ALLOWS_ENV, "").split(",")


def allowing(*rules: str) -> dict[str, str]:
    """Return the environment in which some rules do not hold."""
    assert set(rules) <= set(RULES), rules
    return {ALLOWS_ENV: ",".join(rules)}
