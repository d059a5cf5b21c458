"""AWS Trainium through TorchNeuron, which registers the device type neuron and a process group of that name.

Not verified on a device (docs/limits.md). Facts are those of AWS's documentation and of the public beta's source
(torch-neuronx of SDK 2.33): no float64, eager operations without fused AdamW, no flex attention. A comment lists
the variables of the runtime that hlat reads or sets, or that a user may want to know.

    join the group: it assigns the process its core and starts the runtime --> select that core --> compute
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from hlat.runtime.backend.base import AttentionHeads, Backend, Collectives
from hlat.runtime.backend.table import driver_versions
from hlat.runtime.errors import LaunchError
from hlat.runtime.version import installed_version

# The hypervisor of EC2 writes the instance type here, for releases whose devices do not report it.
PRODUCT_NAME = Path("/sys/devices/virtual/dmi/id/product_name")

_PACKAGE = "torch_neuronx"
_VISIBLE_CORES = "NEURON_RT_VISIBLE_CORES"
_CORES_PER_DEVICE = "NEURON_LOGICAL_NC_CONFIG"
_ROUNDING = "NEURON_RT_STOCHASTIC_ROUNDING_EN"
_ROUNDING_SEED = "NEURON_RT_STOCHASTIC_ROUNDING_SEED"
_OFF = ("", "0", "false")
_NEFF_CACHE = "TORCH_NEURONX_NEFF_CACHE_DIR"
_HLO_CACHE = "TORCH_NEURONX_HLO_CACHE_DIR"
_COMPILER_PACKAGES = (_PACKAGE, "neuronx-cc")

# Environment variables of TorchNeuron, its runtime, compiler and network. hlat reads the first two, and sets the
# folders of compiled code; the process group sets the first and third if nobody has.
#   NEURON_RT_VISIBLE_CORES: cores that a process sees, such as 3 or 0-7
#   NEURON_LOGICAL_NC_CONFIG: physical cores of a logical core: 1 or 2
#   NEURON_RT_ROOT_COMM_ID: address and port where the runtimes of a run find each other
#   NEURON_RT_EXEC_TIMEOUT: seconds after which the runtime gives an execution up
#   NEURON_RT_LOG_LEVEL: level of the runtime's messages: ERROR, WARNING, INFO or DEBUG
#   NEURON_RT_STOCHASTIC_ROUNDING_EN: 1 rounds conversions to fewer bits stochastically (precision.rounding)
#   NEURON_RT_STOCHASTIC_ROUNDING_SEED: seed of that; hlat sets both, from the recipe's seed and the rank
#   NEURON_CC_FLAGS: options of the compiler neuronx-cc
#   TORCH_NEURONX_NEFF_CACHE_DIR: folder of compiled code; hlat gives each rank its own (run.compile_cache)
#   TORCH_NEURONX_HLO_CACHE_DIR: folder of graphs before they are compiled, likewise
#   TORCH_NEURONX_DISABLE_NEFF_CACHE: 1 compiles everything anew in every process
#   TORCH_NEURONX_COMPILE_ONLY: 1 compiles without a device and executes nothing, for hlat compile
#   COLLECTIVE_BUCKETSIZE_IN_MB: size from which an all-gather or reduce-scatter is divided
#   FI_PROVIDER: efa between machines; the cluster catalog sets it (hlat doctor, hlat submit)
#   FI_EFA_USE_DEVICE_RDMA: 1 between machines, likewise


class NeuronBackend(Backend):
    """Logical cores of Trainium chips."""

    collectives = Collectives("neuron")
    visible_devices_variable = _VISIBLE_CORES
    group_before_device = True  # init_process_group asserts that the runtime has not been started
    group_differs = True  # the beta has no send and receive, the documentation of SDK 2.33 lists pipelines
    sends = False
    rounding_kernel = "compiled"  # operator by operator it would be over a hundred launches per parameter
    rounds_in_hardware = True
    unequal_all_to_all = False
    materialises_masks = True  # torch.nn.attention.bias aligns a causal mask in kernels of CUDA only
    deterministic_mode = False  # "Adaptive Eager Execution optimizations are disabled" (pytorch-native-overview)
    compile_backend = "neuron"
    compiler = None  # eager operations are compiled too: the compiler is installed with the device
    compile_cache = {"TORCHINDUCTOR_CACHE_DIR": "inductor", _HLO_CACHE: "hlo", _NEFF_CACHE: "neff"}
    compile_cache_per_rank = True  # ranks race for a common one (vllm-neuron gives each rank_N/{inductor,hlo,neff})

    def is_initialized(self) -> bool:
        modules = (torch.get_device_module(self.device_type), sys.modules.get(_PACKAGE))
        # Releases differ in the name of the question.
        names = ("is_neuron_runtime_initialized", "is_initialized")
        return any(bool(getattr(module, name, lambda: False)()) for module in modules for name in names)

    def configure_rounding(self, in_hardware: bool, seed: int) -> None:
        if not in_hardware:
            if os.environ.get(_ROUNDING, "").lower() not in _OFF:
                raise LaunchError(
                    f"{_ROUNDING}={os.environ[_ROUNDING]} is set, and every conversion would be rounded stochastically "
                    "by the hardware, also what the optimizer has rounded already. Unset it; or choose it with "
                    "precision.rounding=hardware (and precision.mode=bf16-sr), which sets it."
                )
            return
        if self.is_initialized():
            raise LaunchError(
                "precision.rounding=hardware: this process has started the Neuron runtime already, which rounds as it "
                "was told then. Train in a new process."
            )
        # The runtime reads them when it loads a program.
        os.environ.update({_ROUNDING: "1", _ROUNDING_SEED: str(seed)})

    def group_refusal(self, ranks: Sequence[int]) -> str:
        # A group has to be regular, with translations that tile a run.
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        regular = list(ranks) == list(range(ranks[0], ranks[0] + stride * len(ranks), stride))
        if regular and ranks[0] % (stride * len(ranks)) < stride:
            return ""
        return (
            f"ranks {', '.join(map(str, ranks))} are not evenly spaced and aligned, as groups of Neuron cores must be"
        )

    def compile_refusal(self, compute: torch.dtype, flops: float, world: int, device: torch.device) -> str:
        return ""  # uncompiled, every operation is launched alone, at its own cost

    def compiler_versions(self, device: torch.device) -> dict[str, str]:
        # Empty for a release that names a package otherwise.
        packages = {package: installed_version(package) for package in _COMPILER_PACKAGES}
        return super().compiler_versions(device) | packages

    def _expected_attention(self, heads: AttentionHeads, deterministic: bool, device: torch.device) -> str:
        return "overrideable"  # a fused kernel of the device's package, say users of the beta; not verified

    def chip_name(self, device: torch.device) -> str | None:
        return self.instance_type(device) or None  # get_device_name repeats its argument

    def instance_type(self, device: torch.device) -> str | None:
        """Return the EC2 instance type or its family: the device's, else the machine's; empty elsewhere."""
        properties = getattr(torch.get_device_module(device), "get_device_properties", None)
        try:
            return str(properties(device).name)  # type: ignore[misc]
        except (RuntimeError, ValueError, TypeError, AttributeError):  # a release without it, or another argument
            pass
        try:
            return PRODUCT_NAME.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return ""

    def software(self) -> dict[str, str]:
        driver = driver_versions().get(self.device_type)
        return {} if driver is None else {"driver": driver}

    def cores_per_device(self) -> int | None:
        configured = os.environ.get(_CORES_PER_DEVICE, "")  # physical cores of a logical core
        return int(configured) if configured.isdecimal() and int(configured) > 0 else None


BACKEND = NeuronBackend("neuron")
