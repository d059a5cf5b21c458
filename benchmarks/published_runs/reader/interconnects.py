"""Interconnects: bytes per second that a node sends to others, as published in words.

    "NVLink node + 8x NDR400 per node" -> clauses -> [count x] rate [per scope] -> 400e9 bytes per second and node

    clause    = [count "x" | count name | rails] (rate | technology [rate]) ["x" count] [scope]
    rate      = number unit | number "/" number unit       (Gb/s, Gbps, GB/s, Tb/s, 400G)
    scope     = "per" (node | chip | adapter) | "between nodes" | "inter-node"

Rates of technologies are those of one port, four lanes wide: InfiniBand Trade Association, roadmap
(FDR 56, EDR 100, HDR 200, NDR 400, XDR 800 Gb/s); NVIDIA's adapters (ConnectX-6 200, -7 400, -8 800); HPE Slingshot-10
100, -11 200; Omni-Path 100. EFA is a service of the instance: its rate follows from the chip (EC2's list of instances).

"2x HDR per GPU" is two links of each GPU. "8x HDR per GPU" is refused on a node of eight: it may be one link of each.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from published_runs.reader.reading import Certainty, UnreadableError
from published_runs.reader.texts import has_word, is_unstated, plain

_PORTS = {
    "hdr100": 100, "ndr200": 200, "fdr": 56, "edr": 100, "hdr": 200, "ndr": 400, "xdr": 800, "qdr": 40,
    **{f"(?:connectx|cx)[- ]?{number}": rate for number, rate in ((5, 100), (6, 200), (7, 400), (8, 800))},
    "quantum-?2": 400, "quantum-?x800": 800, "slingshot[- ]?10": 100, "slingshot[- ]?11": 200, "omni-?path": 100,
}  # fmt: skip
"""Gb/s of one port."""
_EFA = {"a100": 400, "h100": 3200, "h200": 3200, "b200": 3200, "b300": 6400, "trainium1": 800, "trainium2": 3200}
"""Gb/s per instance, by chip: p4d and p4de, p5, p5e and p5en, p6-b200, p6-b300, trn1, trn2."""
_MACHINES = {
    r"a3[- ]?mega\w*(?:-\w+)?": 1600, r"a3[- ]?ultra\w*(?:-\w+)?": 3200, r"a3(?:[- ]?high\w*(?:-\w+)?)?": 800,
    r"a4x\w*": 1600, r"a4(?:[- ]?high\w*(?:-\w+)?)?": 3200, r"a2[- ]?(?:high|mega|ultra)\w*(?:-\w+)?": 100,
}  # fmt: skip
"""Gb/s of the NICs for GPUs in Google's machines: 4 and 8 of 200 in A3 High and Mega, 8 of 400 in A3 Ultra and A4, 4 of
400 in A4X (https://cloud.google.com/compute/docs/gpus/gpu-network-bandwidth)."""
_REACHED = {"omni-?path": 0.34}
"""Share of the nominal rate that NCCL gets, relative to networks with direct access to device memory: 55 Gb/s in
all-reduces of 16 nodes with four links of 100 Gb/s, which send twice the message (bigscience-workshop/bigscience,
experiments/bandwidth/README.md)."""
_LOCAL = r"nvlink\S*|nvswitch\S*|nvl\d*|neuronlink\S*|xgmi|infinity fabric|ici|pcie\S*|intra-?node|within (?:a )?node"
_ASIDE = r"storage|management|front-?end|in-?band|out-?of-?band|ethernet nic"  # networks that gradients do not cross
_NODE = r"node|server|host|instance|machine|box|system|vm"
_CHIP = r"gpu|chip|accelerator|device|tpu|core"
_ADAPTER = r"nic|port|link|hca|adapter|card|rail|interface"
_SCOPE = re.compile(rf"(?:per|/|each)\s*(?:(?P<node>{_NODE})|(?P<chip>{_CHIP})|(?P<adapter>{_ADAPTER}))s?\b")
_NUMBER = r"\d[\d,]*(?:\.\d+)?"
_RATE = re.compile(
    rf"(?P<one>{_NUMBER})(?:\s*/\s*(?P<two>{_NUMBER}))?\s*-?"
    r"(?P<size>[KMGTkmgt])i?(?P<unit>bytes?|bits?|bE|[bB](?![a-zA-Z])|[bB](?=ps|PS)|(?=\s|$|[),;/]))"
    r"(?:/s(?:ec)?|ps|PS)?"
)
_RAILS = {"single": 1, "dual": 2, "quad": 4, "four": 4, "eight": 8, "two": 2}
_BETWEEN = re.compile(
    rf"between (?:the )?(?:{_NODE})s|inter-?(?:{_NODE})|(?:{_NODE})-to-(?:{_NODE})|across (?:{_NODE})s"
)
# Words between a number of adapters and their rate: makers, technologies, and what an adapter is called.
_NAMES = (
    rf"nvidia|mellanox|infiniband|ib|roce(?:\s?v?2)?|ethernet|efa\s?-?(?:v\d)?|bluefield[- ]?\d|single[- ]port|"
    rf"{'|'.join(_PORTS)}|(?:{_ADAPTER})s?"
)
_COUNT = re.compile(rf"(?:(?<![\w.])(\d+)\s*[x*]|\b(two|dual|four|quad|eight))[\s(-]*(?:(?:{_NAMES})[\s(-]*)*$")
_COUNT_AFTER = re.compile(rf"\s*[x*]\s*(\d+)\b(?!\s*(?:[gt]|(?:(?:compute|worker|[dh]gx) )?(?:{_NODE})s?\b))")
# "8 ConnectX-7": a number at the beginning of a clause, since "ConnectX 7 NDR" has no seven links.
_COUNT_OF_NAMES = re.compile(rf"(?:^|[(:])\s*(\d{{1,2}})\s+(?:{_NAMES})(?![a-z])")
_ONE_EACH = re.compile(rf"\b(?:one|1)\s*(?:(?:{_ADAPTER})s?\s*)?(?:per|for (?:each|every)|/)\s*(?:{_CHIP})\b")
_UNCLEAR = re.compile(
    rf"(?:dual|two|quad)[- ]ports?\b|bi-?directional|both directions|"
    rf"(?:per|/|each|for)\s*(?:\d+|two|four|pair of)\s*(?:{_CHIP})s?\b"
)
_LARGEST_PORT = 800  # Gb/s; more than what one chip can send
_MOST_LINKS = 64  # of a node; 32 in instances with EFA


@dataclass(frozen=True)
class Network:
    """Network of a run.

    Attributes:
        rate: bytes per second of a node; 0 to take the catalog's.
        slices: fast-link domains of the run; 0 if not stated.
        domain: chips of a fast-link domain (NVL72); 0 if not stated.
        sure: certainty of the rate.
        reason: convention or assumption, if the rate is not stated.
    """

    rate: float = 0.0
    slices: int = 0
    domain: int = 0
    sure: Certainty = "stated"
    reason: str = ""


def read_network(text: str | None, chip: str, chips_per_node: int, usual: float) -> Network:
    """Read the text of an interconnect.

    Args:
        text: the text.
        chip: chip's name, in lower case without spaces, for EFA.
        chips_per_node: chips of a node, for rates per chip.
        usual: bytes per second of a node in the catalog, which decides between stated alternatives.

    Raises:
        UnreadableError: the text does not give the rate of a node, or is not understood.
    """
    folded = plain(text)
    if is_unstated(folded):
        raise UnreadableError("interconnect not stated")
    structure = _structure(folded.lower())
    clauses = [part for part in re.split(r"\s*(?:\+|;|,(?!\d)|\band\b|\bwith\b)\s*", folded) if part.strip()]
    outside = [part for part in clauses if not has_word(f"{_LOCAL}|{_ASIDE}", part.lower())]
    found = [network for part in outside for network in _networks(part, chip, chips_per_node, usual)]
    if found:
        # A technology beside a stated rate describes the same network.
        rates = [network for network in found if network.sure == "stated"] or found
        best = rates[0]
        if any(abs(other.rate - best.rate) > 1e-6 * best.rate for other in rates[1:]):
            raise UnreadableError(f"several rates of a node: {text!r}")
        return replace(best, slices=structure.slices, domain=structure.domain)
    if structure.slices or has_word(r"single[- ]node|one node|1 node|nvlink only", folded.lower()):
        return structure
    raise UnreadableError(f"no rate of a node in {text!r}")


def machine_network(text: str | None) -> Network | None:
    """The network of a cloud's machine that a text names; None if it names none."""
    small = plain(text).lower()
    found = next((rate for name, rate in _MACHINES.items() if has_word(name, small)), None)
    if found is None:
        return None
    return Network(found * 1e9 / 8, sure="implied", reason=f"NICs for GPUs of this machine: {found} Gb/s")


def _structure(text: str) -> Network:
    """Slices and fast-link domains that a text names."""
    slices = re.search(r"(\d+)\s*(?:slice|pod)", text)
    domain = re.search(r"\bnvl-?(\d+)\b", text)
    whole = 1 if has_word("ici", text) else 0
    return Network(slices=int(slices[1]) if slices else whole, domain=int(domain[1]) if domain else 0)


def _networks(clause: str, chip: str, chips: int, usual: float) -> Iterator[Network]:
    """The network of a clause, if it has a rate or names a technology."""
    small = clause.lower()
    if (unclear := _UNCLEAR.search(small)) is not None:
        raise UnreadableError(f"not the rate of one device in one direction: {unclear[0]!r}")
    technology = next((name for name in _PORTS if re.search(rf"(?<![a-wyz0-9]){name}(?![a-z])", small)), None)
    rate, technical = _RATE.search(clause), technology and re.search(technology, small)
    if rate is not None:
        options, start = _gigabits(rate), min(rate.start(), technical.start() if technical else rate.start())
        sure: Certainty = "stated"
    elif technical:
        assert technology is not None, "a match has a pattern"
        named = re.match(r"\s*-?(\d{2,4})\b(?!\s*x)", small[technical.end() :])
        alternatives = re.findall(r"/\s*(fdr|edr|hdr|ndr|xdr)(?![a-z0-9])", small[technical.end() :])
        options = [float(named[1])] if named else [float(_PORTS[technology])]
        options += [float(_PORTS[other]) for other in alternatives]
        start, sure = technical.start(), "stated" if named else "implied"
    elif has_word(r"efa\s?-?(?:v\d)?", small):
        efa = next((value for name, value in _EFA.items() if chip.startswith(name)), None)
        if efa is not None:
            yield Network(efa * 1e9 / 8, sure="implied", reason=f"EFA of {chip}: {efa} Gb/s per instance")
        return
    else:
        return
    share = next((value for name, value in _REACHED.items() if re.search(name, small)), 1.0)
    end = max(match.end() for match in (rate, technical) if match)
    yield _per_node(clause, small, (start, end), options, sure, chips, usual, share)


def _gigabits(rate: re.Match[str]) -> list[float]:
    """Gb/s of each alternative of a rate."""
    unit = rate["unit"]
    if rate[0].endswith("PS") and unit == "B":
        raise UnreadableError(f"bits or bytes: {rate[0]!r}")
    in_bytes = unit.lower().startswith("byte") or (unit == "B")
    scale = {"k": 1e-6, "m": 1e-3, "g": 1.0, "t": 1e3}[rate["size"].lower()] * (8 if in_bytes else 1)
    numbers = [rate["one"], *([rate["two"]] if rate["two"] else [])]
    return [float(number.replace(",", "")) * scale for number in numbers]


def _links(small: str, place: tuple[int, int]) -> int:
    """Number of links of a clause, with a rate or technology at a place of it; 0 if it has none."""
    start, end = place
    rate = _RATE.search(small)
    rails = re.search(r"\b(\d+|single|dual|quad)[- ]?rail", small)
    nics = re.search(rf"\b(\d+|two|four|eight)\s*(?:{_ADAPTER})s?\b", small)
    found = (
        _COUNT.search(small[:start]),
        _COUNT_AFTER.match(small, end),
        _COUNT.search(small[: rate.start()]) if rate else None,
        rails,
        nics,
        _COUNT_OF_NAMES.search(small),
    )
    word = next((word[word.lastindex or 0] for word in found if word), None)
    if word is None:
        return 0
    count = _RAILS.get(word) or int(word)
    if not 0 < count <= _MOST_LINKS:
        raise UnreadableError(f"{count} links of a node: {small!r}")
    return count


def _links_of_node(clause: str, count: int, gigabits: float, chips: int) -> int:
    """Links of a node, of a clause that says how many a chip has; ``count`` is 0 if it has no number."""
    if _ONE_EACH.search(clause.lower()) and count in (0, 1, chips):
        return chips
    if count > 1 and (count == chips or count * gigabits > _LARGEST_PORT):
        raise UnreadableError(f"{count} links of a node or of a chip: {clause!r}")
    return max(count, 1) * chips


def _per_node(
    clause: str,
    small: str,
    place: tuple[int, int],
    options: list[float],
    sure: Certainty,
    chips: int,
    usual: float,
    share: float,
) -> Network:
    """The rate of a node, from rates of one unit (at a place of the clause), their number and their scope."""
    count, scope = _links(small, place), _SCOPE.search(small)
    reason = ""
    if scope is not None and scope["chip"]:
        factor = _links_of_node(clause, count, max(options), chips)
    elif count:
        factor = count
    elif (scope is not None and scope["node"]) or _BETWEEN.search(small):
        factor = 1
    else:
        # Without number and scope: a rate above that of any port is a node's; otherwise a node's or a chip's.
        both = [value * many for value in options for many in ((1, chips) if value <= _LARGEST_PORT else (1,))]
        options, factor, sure = both, 1, "implied"
        reason = "rate without scope: a node's or a chip's, the one nearer to the catalog's"
    rates = [value * factor * share * 1e9 / 8 for value in options]
    if len(rates) > 1:
        if not reason:
            sure, reason = "implied", f"one of several stated rates, nearest to the catalog's: {clause}"
        rates.sort(key=lambda value: (abs(value - usual), value))
    if not 0 < rates[0] < 1e14:
        raise UnreadableError(f"not a rate of a network: {clause!r}")
    return Network(rates[0], sure=sure, reason=reason or ("port rate of the technology" if sure == "implied" else ""))
