"""Device figures for the cost model, from the hardware catalog.

Cluster -> DeviceSpec: figures per torch device; where none is published, that of the nearest chip
"""

from dataclasses import replace

from hlat.hardware import Cluster
from hlat.planner.problem.families import CHIP_FAMILIES
from hlat.planner.problem.request import PlanRequest
from hlat.planner.problem.workload import DeviceSpec
from hlat.precision import MODES

# Share of the peak that large matrix products reach, for chips of which it was never measured. NVIDIA: the nearest chip
# of the family. Others: nothing is published, and the constant `products` already contains the sustained share.
# Other families: that of the chips whose constants they take; AMD's, of an MI300X.
_REACHED = {
    "ampere": 0.869,
    "hopper": 0.803,
    "blackwell": 0.776,
    "trainium": 0.9,
    "tpu": 0.9,
    "measured": 1.0,
    "cdna": 0.511,
    # 2,487 TFLOP/s of 12 x 416 in an Aurora node, all dies busy (one alone: 256): Argonne's user guide, table of GEMM,
    # https://docs.alcf.anl.gov/aurora/node-performance-overview/node-performance-overview/
    "xe": 0.498,
}
_REACHED_EIGHT_BIT = {
    "ampere": 0.869,
    "hopper": 0.709,
    "blackwell": 0.763,
    "trainium": 0.9,
    "tpu": 0.9,
    "measured": 1.0,
    "cdna": 0.487,  # 1,273 of 2,615 TFLOP/s, AMD's own measurement of an MI300X
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


def cluster_device(cluster: Cluster) -> DeviceSpec:
    """One torch device of a cluster. Its fast-link domain may be larger than the cluster."""
    chip, instance = cluster.chip, cluster.instance
    family = chip.family if chip.family in CHIP_FAMILIES else "measured"
    nearest = CHIP_FAMILIES[family].like or family
    measured, steps = chip.reached, instance.collectives
    reached = (measured and measured.bfloat16) or _REACHED.get(family, _REACHED[nearest])
    return DeviceSpec(
        family=family,
        peak=chip.flops(chip.sixteen_bit or "") or 0.0,
        peak_eight_bit=chip.flops("float8") or 0.0,
        reached=reached,
        reached_eight_bit=(measured and measured.float8) or _REACHED_EIGHT_BIT.get(family, _REACHED_EIGHT_BIT[nearest]),
        units=chip.units,
        memory_bytes=cluster.memory_bytes,
        memory_rate=cluster.memory_rate,
        link_rate=cluster.link_rate,
        domain=instance.domain * chip.devices,
        network_rate=cluster.network_rate,
        per_instance=cluster.devices_per_instance,
        per_chip=chip.devices,
        # Attention runs on the matrix engines too: a relative's share of the peak shrinks with what products reach.
        attention_rate=1.0 if nearest == family else reached / _REACHED[nearest],
        hop=1e-6 * steps.hop_us if steps else 0.0,
        network_hop=1e-6 * steps.network_hop_us if steps else 0.0,
        direct_bytes=1e6 * steps.direct_mb if steps else 0.0,
        doubling_bytes=1e6 * steps.doubling_mb if steps else 0.0,
    )
