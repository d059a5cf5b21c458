"""Device of a published run: the catalog's rates, with the machine and the network that the row states.

RowColumns, chip -> instance of so many chips -> network by the text of the row -> DeviceSpec
"""

from dataclasses import replace

from hlat.hardware import Cluster
from hlat.planner.problem.devices import cluster_device
from hlat.planner.problem.workload import DeviceSpec
from published_runs.reader import (
    Network,
    Reading,
    RunChip,
    UnreadableError,
    is_unstated,
    lower,
    machine_network,
    read_network,
)
from published_runs.row.columns import RowColumns

_UNKNOWN_NETWORK = 0.1
"""Spread of a step on several machines whose network is not known: halving the network costs ZeRO 3 about a tenth."""


def read_device(columns: RowColumns, chip: RunChip, chips: int, chips_per_node: int, scale: float) -> DeviceSpec:
    """Read one torch device of a run, its links and its network.

    Args:
        columns: the row.
        chip: its chip.
        chips: chips of the run.
        chips_per_node: chips of a machine; 0 if not stated.
        scale: devices of the catalog per device of the row.
    """
    instance = chip.instance
    tpu = chip.chip.family == "tpu"
    if chips_per_node and chips_per_node != instance.chips and instance.domain <= instance.chips and not tpu:
        share = chips_per_node / instance.chips
        domain = min(instance.domain, chips_per_node) if share < 1 else chips_per_node
        changes = {"chips": chips_per_node, "domain": domain, "network": instance.network * share}
        instance = instance.model_copy(update=changes)
    device = cluster_device(Cluster(instance, chip.chip, 1))
    network = _network(columns, chip, chips, instance.chips, device.network_rate)
    domain = device.domain
    if tpu:
        # A slice is one fast-link domain; slices communicate over the data centre's network.
        domain = max(1, chips * chip.chip.devices // max(1, network.slices))
    elif network.domain > 1:
        domain = network.domain * chip.chip.devices
    changed = replace(
        device,
        reached=device.reached * chip.speed,
        reached_eight_bit=device.reached_eight_bit * chip.speed,
        attention_rate=device.attention_rate * chip.speed,
        network_rate=network.rate or device.network_rate,
        domain=domain,
    )
    return changed if scale == 1 else _divided(changed, scale)


def _network(columns: RowColumns, chip: RunChip, chips: int, chips_per_node: int, usual: float) -> Network:
    """The network that the row states; the catalog's, as an assumption, if the text is not understood."""
    text = columns.row.get("interconnect")
    name = lower(chip.chip.name).split()[0]
    single = chips <= max(chips_per_node, chip.instance.domain)
    try:
        network = read_network(text, name, chips_per_node, usual)
    except UnreadableError as error:
        if single:
            return Network()
        if is_unstated(text) and (machine := machine_network(columns.row.get("chip"))) is not None:
            return columns.keep(Reading("interconnect", columns.text("chip"), machine, "implied", machine.reason, 0.03))
        reason = f"{error}: the catalog's network of {chip.instance.name}"
        spread = 0.0 if chip.chip.family == "tpu" else _UNKNOWN_NETWORK
        return columns.keep(Reading("interconnect", text or "", Network(), "assumed", reason, spread))
    spread = 0.03 if network.sure != "stated" and not single else 0.0
    return columns.keep(Reading("interconnect", text or "", network, network.sure, network.reason, spread))


def _divided(device: DeviceSpec, scale: float) -> DeviceSpec:
    """The device for rows that count other devices per chip than the catalog, as NeuronCores one by one."""
    names = ("peak", "peak_eight_bit", "memory_bytes", "memory_rate", "link_rate")
    rates = {name: getattr(device, name) * scale for name in names}
    return replace(
        device,
        **rates,
        domain=round(device.domain / scale),
        per_instance=round(device.per_instance / scale),
        per_chip=round(device.per_chip / scale),
    )
