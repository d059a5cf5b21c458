"""Chips: a published name to a chip of the catalog, its machine, and what the name says beyond both.

    "NVIDIA H100-SXM5 80GB (500W)" -> words {h100, sxm, 80gb}, 500 W -> chip "H100 SXM", instance "h100", 500 of 700 W

A name is understood if all words of one catalog name occur in it; the longest such name wins. A memory that is stated
must be the chip's. Chips without an instance in the catalog get a machine whose chips share PCIe 4.0 (31.5e9 bytes per
second), which the reading says. "(tile)" and "GCD" name one of the dies that torch takes for devices.
"""

import re
from dataclasses import dataclass, replace

from hlat.hardware import Catalog, Chip, Instance
from published_runs.reader.reading import Reading, UnreadableError
from published_runs.reader.texts import is_unstated, lower

_SYNONYMS = (
    (r"\ba[234]x?-\w+-\d+g\b", ""),  # machines of Google's cloud: 8g is a number of GPUs
    (r"\btrillium\b", "tpu v6e"),
    (r"\bironwood\b", "tpu 7x"),
    (r"\btpu[ -]?v?7x?\b", "tpu 7x"),
    (r"\btpu[ -]?v?(\d)[ -]?(?:lite(?:pod)?)\b", r"tpu v\1e"),
    (r"\btpu[ -]?v?(\d[ep]?)\b", r"tpu v\1"),
    (r"^v([456][ep]?)(?=-|$)", r"tpu v\1"),
    (r"\btrn(\d)[nu]?\b", r"trainium\1"),
    (r"\btrainium[ -]?(\d)\b", r"trainium\1"),
    (r"\btrainium\b(?!\d)", "trainium1"),
    (r"\brtx[ -]?(\d{4})\b", r"rtx \1"),
    (r"\bgaudi[ -]?(\d)\b", r"gaudi \1"),
    (r"\b([a-z]{1,2}\d{2,3})x(?=\d+ ?g)", r"\1 "),
    (r"\b([ahbv]\d{2,3}|gb\d{3})[ -]?(sxm|pcie|nvl)", r"\1 \2"),
    (r"\bsxm\d\b", "sxm"),
    (r"\bpci[- ]e\b|\bpci express\b", "pcie"),
    (r"\b(\d+)[ -]?gi?b?\b", r"\1gb"),
)
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(?:gi?b?)?\b.*")
_DIES = r"tiles?|gcds?|dies?|stacks?"
_FORMS = r"sxm\d?|pcie|pci-e|pci express|nvl|oam|mezzanine(?: card)?|hgx|dgx|superchip"
_OTHER_PRODUCTS = r"mig|laptop|mobile|max-?q|ti|super|\d+g\.\d+gb"
_PCIE = 31.5  # 10^9 bytes per second in one direction, PCIe 4.0, 16 lanes
_PCIE_NODE = 25.0  # 10^9 bytes per second of a machine without a published network: 200 Gb/s
_USUAL_MEMORY = {"a100": "80gb", "a800": "80gb", "v100": "16gb", "gh200": "96gb"}
_USUAL_FORM = {"h100": "sxm", "h200": "sxm", "h800": "sxm", "max": "1550"}
_SAME_MEMORY = 0.1  # 80 GB are 74.5 GiB, and a B200 of 192 GB has 180 GiB for programs


_IN_MIB = re.compile(r"(\d{2,3},?\d{3})\s*MiB", re.IGNORECASE)  # as nvidia-smi shows it


@dataclass(frozen=True)
class RunChip:
    """Chip and machine of a run.

    Attributes:
        chip: chip of the catalog.
        instance: machine, of the catalog or assumed.
        speed: share of the chip's sustained rate that its power limit leaves.
    """

    chip: Chip
    instance: Instance
    speed: float = 1.0

    def __str__(self) -> str:
        capped = f", {self.speed:.0%} of its speed" if self.speed < 1 else ""
        return f"{self.chip.name} in {self.instance.name}{capped}"


def read_chip(
    text: str | None, catalog: Catalog, chips_per_node: int, form: str | None = None, memory: str | None = None
) -> Reading[RunChip]:
    """Find the chip of a published name in a catalog.

    Args:
        text: name of a chip, or of an instance of the catalog.
        catalog: shipped chips, and the user's.
        chips_per_node: chips of a node, for machines that the catalog lacks; 0 if not stated.
        form: form factor, where the row states it apart.
        memory: memory of the chip, where the row states it apart, with a power limit or without.

    Raises:
        UnreadableError: no chip of the catalog has this name, or it could be several; or its memory is another.
    """
    name = (text or "").strip()
    if is_unstated(name):
        raise UnreadableError("chip not stated")
    memory = _IN_MIB.sub(lambda size: f"{float(size[1].replace(',', '')) / 1024:.0f} GiB", memory or "")
    other = _other_memory(memory)
    read = _named(name, _extra(form, _power_words(memory) if other else memory), catalog, chips_per_node)
    if other is not None:
        chip = read.value.chip
        assert chip.memory is not None, "chips without memory are refused"
        changed = chip.model_copy(update={"memory": chip.memory.model_copy(update=other)})
        return replace(read, value=replace(read.value, chip=changed))
    if not is_unstated(memory):
        _check_memory(name, lower(memory), read.value.chip)
    return read


def _other_memory(text: str | None) -> dict[str, float] | None:
    """A memory that is stated with its rate, and so needs no catalog: "96 GB HBM2e, 2.4 TB/s"; None for others."""
    rate = re.search(r"(\d+(?:\.\d+)?) ?(g|t)i?b/s", lower(text))
    size = re.match(r"(\d+(?:\.\d+)?) ?g(i?)b?\b(?!/s)", lower(text))
    if rate is None or size is None:
        return None
    gib = float(size[1]) / (1.0 if size[2] else 1.073741824)
    return {"gib": gib, "gb_per_second": float(rate[1]) * (1000 if rate[2] == "t" else 1)}


def _power_words(text: str | None) -> str:
    """The power limit in a text, with its unit; empty if there is none."""
    found = re.search(r"\d{2,4}\s*w(?:atts?)?\b", lower(text))
    return found[0] if found else ""


def _extra(form: str | None, memory: str | None) -> str:
    """The words that other columns add to a name: a form factor, a memory in whole GB, a power limit."""
    words = "" if is_unstated(form) else lower(form)
    if words and not re.fullmatch(_FORMS, words):
        raise UnreadableError(f"form factor not understood: {form}")
    stated = "" if is_unstated(memory) else lower(memory)
    size = re.match(r"(\d+)(?:\.0+)?\s*(?:gi?b?)?(?![\d.]|\s*w)", stated)
    return " ".join(filter(None, (words, size and f"{size[1]}gb", _power_words(memory))))


def _check_memory(name: str, text: str, chip: Chip) -> None:
    """Raise UnreadableError if a stated memory is not the chip's, in GiB or in GB."""
    size = _MEMORY.fullmatch(text)
    if size is None:
        raise UnreadableError(f"memory of the chip not understood: {text}")
    assert chip.memory is not None, "chips without memory are refused"
    if not any(abs(float(size[1]) / scale / chip.memory.gib - 1) <= _SAME_MEMORY for scale in (1.0, 1.073741824)):
        raise UnreadableError(f"{name}: the {chip.name} of the catalog has {chip.memory.gib:g} GiB, not {text}")


def _named(name: str, extra: str, catalog: Catalog, chips_per_node: int) -> Reading[RunChip]:
    """Find the chip of a name and of further words."""
    instance = catalog.instance(name)
    # The name of a plain machine is often that of a chip, of which other columns may name a version: V100 with 32 GB.
    several = bool(extra) and _catalog_chip(_words(_spelled(lower(f"{name} {extra}"))), catalog)[0] is not None
    if instance is not None and not several:
        chip = catalog.chip(instance.chip)
        assert chip is not None, "the catalog has been validated"
        return Reading("chip", name, RunChip(chip, instance))
    exact = catalog.chip(name) or catalog.chip_by_torch_name(name)
    if exact is not None and not _power_words(extra):
        return _on_machine(name, exact, catalog, chips_per_node)
    return _by_words(name, extra, catalog, chips_per_node)


def _by_words(name: str, extra: str, catalog: Catalog, chips_per_node: int) -> Reading[RunChip]:
    folded = lower(f"{name} {extra}").replace("_", " ")
    if re.search(rf"(?<![a-z0-9])(?:{_OTHER_PRODUCTS})(?![a-z0-9])", folded):
        raise UnreadableError(f"chip not in the catalog: {name}")
    words = _words(_spelled(folded))
    chip, said = _catalog_chip(words, catalog)
    if chip is None:
        raise UnreadableError(f"chip not in the catalog: {name}")
    stated = next((word for word in words if re.fullmatch(r"\d+gb", word)), "")
    dies = chip.devices if re.search(rf"(?<![a-z])(?:{_DIES})(?![a-z])", folded) else 1
    chip = _die(chip) if dies > 1 else chip
    if stated and chip.memory is not None:
        _check_memory(name, stated, chip)
    found = _on_machine(name, chip, catalog, chips_per_node, pcie="pcie" in words)
    speed, power = _power(folded, chip)
    reasons = [reason for reason in (said, found.reason, power) if reason]
    value = RunChip(found.value.chip, _of_dies(found.value.instance, dies), speed)
    assumed = bool(said) or found.sure == "assumed"
    spread = (0.03 if said else 0.0) + found.spread + (0.04 if power else 0.0)
    sure = "assumed" if assumed else "implied" if power else "stated"
    return Reading("chip", name, value, sure, "; ".join(reasons), spread)  # type: ignore[arg-type]


def _spelled(text: str) -> str:
    for pattern, plain_name in _SYNONYMS:
        text = re.sub(pattern, plain_name, text)
    return text


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9.]+", text))


def _catalog_chip(words: set[str], catalog: Catalog) -> tuple[Chip | None, str]:
    """The chip whose name's words all occur, and the assumption if the words fit only with a usual form or memory."""
    usual = {extra for base, extra in _USUAL_FORM.items() if base in words}
    if not any(re.fullmatch(r"\d+gb", word) for word in words):
        usual |= {extra for base, extra in _USUAL_MEMORY.items() if base in words}
    # A stated number of a model, as in "Max 1100", is not the usual one.
    usual -= {extra for extra in usual if any(re.fullmatch(r"\d{4}", word) for word in words - usual)}
    forms = {"sxm", "pcie", "nvl"} & words
    for extra, said in (
        (set(), ""),
        (usual - {"sxm"} if forms else usual, f"usual version: {', '.join(sorted(usual))}"),
    ):
        fitting = [chip for chip in catalog.chips if _words(_spelled(lower(chip.name))) <= words | extra]
        if fitting:
            return max(fitting, key=lambda chip: len(_words(_spelled(lower(chip.name))))), said
    return None, ""


def _on_machine(
    name: str, chip: Chip, catalog: Catalog, chips_per_node: int, *, pcie: bool = False
) -> Reading[RunChip]:
    """A chip in a machine of the catalog: a plain one (no cloud's type) if there is one; else one that is assumed."""
    if chip.memory is None or chip.sixteen_bit is None:
        raise UnreadableError(f"the catalog has no memory or no 16-bit rate of {chip.name}")
    machines = [instance for instance in catalog.instances if instance.chip == chip.name]
    wanted = [one for one in machines if re.split(r"[.-]", one.name)[0] in lower(name)]
    plain_ones = [one for one in machines if "." not in one.name]
    if machines and not (pcie and "pcie" not in chip.name.lower()):
        # The user's machines come after the shipped ones and are preferred.
        machine = (wanted[:1] or plain_ones[-1:] or machines[:1])[0]
        if machine.up_to is not None:
            machine = machine.with_chips(min(chips_per_node or machine.up_to, machine.up_to))
        return Reading("chip", name, RunChip(chip, machine))
    chips = chips_per_node or 8
    machine = Instance.model_validate(
        {
            "name": f"{chips} x {chip.name} over PCIe",
            "chip": chip.name,
            "chips": chips,
            "domain": chips,
            "link": _PCIE,
            "network": _PCIE_NODE,
            "source": "assumed",
            "failures": {"per_day": 0.0, "source": "assumed"},
        }
    )
    reason = f"the catalog has no machine of it: {chips} chips on PCIe 4.0, 200 Gb/s between machines"
    return Reading("chip", name, RunChip(chip, machine), "assumed", reason, 0.15)


def _die(chip: Chip) -> Chip:
    """One of the devices of a chip, where a row counts those as chips."""
    share = 1 / chip.devices
    assert chip.memory is not None, "chips of several dies have a memory in the catalog"
    memory = {"gib": share * chip.memory.gib, "gb_per_second": share * chip.memory.gb_per_second}
    rates = {name: rate.model_copy(update={"dense": share * rate.dense}) for name, rate in chip.tflops.items()}
    changes = {"cores": chip.cores_per_device, "memory": chip.memory.model_copy(update=memory), "tflops": rates}
    return chip.model_copy(update=changes | {"power": None})


def _of_dies(machine: Instance, dies: int) -> Instance:
    """The machine with its dies counted as chips."""
    changes = {"chips": dies * machine.chips, "domain": dies * machine.domain, "link": machine.link / dies}
    return machine.model_copy(update=changes)


def _power(text: str, chip: Chip) -> tuple[float, str]:
    """Share of the sustained rate under a stated power limit, and the reason.

    Dynamic power grows with the cube of the clock, since the voltage falls with it (P = C V^2 f): the rate falls with
    the cube root of the power.
    """
    stated = re.search(r"(\d{2,4})\s*w(?:atts?)?\b", text)
    if stated is None or chip.power is None or int(stated[1]) >= chip.power.watts:
        return 1.0, ""
    speed = (int(stated[1]) / chip.power.watts) ** (1 / 3)
    return speed, f"{stated[1]} of {chip.power.watts:g} W: {speed:.0%} of the sustained rate (cube root)"
