"""Device figures for the cost model, from the hardware catalog.

Chip, Instance -> DeviceSpec: figures per torch device; where none is published, that of the nearest chip
"""

from dataclasses import replace

from hlat.hardware import Chip, Cluster, Instance
from hlat.planner.problem.request import PlanRequest
from hlat.planner.problem.workload import FAMILIES, DeviceSpec
from hlat.precision import MODES

# Share of the peak that large matrix products reach, for chips of which it was never measured. NVIDIA: the nearest chip
# of the family. Others: nothing is published, and the constant `products` already contains the sustained share.
_REACHED = {"ampere": 0.869, "hopper": 0.803, "blackwell": 0.776, "trainium": 0.9, "tpu": 0.9, "measured": 1.0}
_REACHED_EIGHT_BIT = {
    "ampere": 0.869,
    "hopper": 0.709,
    "blackwell": 0.763,
    "trainium": 0.9,
    "tpu": 0.9,
    "measured": 1.0,
}


def request_device(request: PlanRequest) -> DeviceSpec:
    """One torch device of the request's cluster, adjusted for its precision mode.

    The formulas count bytes in 16 bits, since every mode but fp32 computes its products so. In fp32 every size doubles;
    the rates are halved instead.
    """
    device = cluster_device(request.cluster)
    if MODES[request.mode].compute.itemsize == 2:
        return device
    peak = request.cluster.chip.flops("float32") or device.peak / 4
    halved = {name: getattr(device, name) / 2 for name in ("memory_rate", "link_rate", "network_rate")}
    return replace(device, peak=peak, **halved)


def instance_device(chip: Chip, instance: Instance) -> DeviceSpec:
    """One torch device of an instance."""
    return cluster_device(Cluster(instance, chip, 1))


def cluster_device(cluster: Cluster) -> DeviceSpec:
    """One torch device of a cluster. Its fast-link domain may be larger than the cluster."""
    chip, instance = cluster.chip, cluster.instance
    family = chip.family if chip.family in FAMILIES else "measured"
    reached = chip.reached
    return DeviceSpec(
        family=family,
        peak=chip.flops("bfloat16") or 0.0,
        peak_eight_bit=chip.flops("float8") or 0.0,
        reached=(reached and reached.bfloat16) or _REACHED[family],
        reached_eight_bit=(reached and reached.float8) or _REACHED_EIGHT_BIT[family],
        units=chip.units,
        memory_bytes=cluster.memory_bytes,
        memory_rate=cluster.memory_rate,
        link_rate=cluster.link_rate,
        domain=instance.domain * chip.devices,
        network_rate=cluster.network_rate,
        per_instance=cluster.devices_per_instance,
    )
