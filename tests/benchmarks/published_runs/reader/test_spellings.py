"""Values rendered in many spellings are read back; texts that say nothing are refused and never get a default."""

import string

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hlat.hardware import load_catalog
from published_runs.reader import (
    UnreadableError,
    parse_count,
    parse_number,
    read_chip,
    read_eight_bit,
    read_network,
    read_recompute,
    read_sequence,
    read_zero,
)

pytestmark = pytest.mark.slow  # no plan reads tables of runs: for who works on the reader

FEW = settings(max_examples=150, deadline=None)
CROSS = st.sampled_from([" x ", "x", "×", " × "])
DASH = st.sampled_from([" ", "-", "–", ""])
NODE = st.sampled_from([" per node", "/node", " per server", " per instance", " per host"])
CHIP = st.sampled_from([" per GPU", "/GPU", " per gpu", " per accelerator", " each GPU"])
BITS = st.sampled_from(["Gb/s", " Gb/s", "Gbps", " Gbps", "Gbit/s", "G", " Gbits/s"])
GARBAGE = st.text(alphabet=string.ascii_letters.replace("x", "") + " -_/#é", min_size=1, max_size=20)


def network(text: str, *, chips: int = 8, usual: float = 400e9, chip: str = "h100") -> float:
    return read_network(text, chip, chips, usual).rate


@FEW
@given(
    st.integers(1, 16),
    st.sampled_from([25, 100, 200, 400, 800]),
    CROSS,
    BITS,
    st.sampled_from(["", " IB", " RoCE"]),
    NODE,
)
def test_a_number_of_adapters_times_their_rate(count, rate, cross, unit, kind, scope):
    """8 x 400 Gb/s per node are 400e9 bytes per second, in any spelling."""
    assert network(f"{count}{cross}{rate}{unit}{kind}{scope}") == pytest.approx(count * rate * 1e9 / 8)


@FEW
@given(st.sampled_from([100, 200, 400]), st.integers(1, 16), BITS, CHIP, st.sampled_from(["NVLink + ", "RoCE ", ""]))
def test_a_rate_per_chip_counts_for_each_chip_of_a_node(rate, chips, unit, scope, prefix):
    assert network(f"{prefix}{rate}{unit}{scope}", chips=chips) == pytest.approx(rate * chips * 1e9 / 8)


@FEW
@given(
    st.sampled_from([("EDR", 100), ("HDR", 200), ("HDR100", 100), ("NDR", 400), ("NDR200", 200), ("XDR", 800)]),
    st.integers(1, 8),
    CROSS,
    st.sampled_from(["", " InfiniBand", " IB"]),
    st.booleans(),
)
def test_generations_of_infiniband(generation, count, cross, kind, small):
    name, rate = generation
    text = f"{count}{cross}{name}{kind} per node"
    assert network(text.lower() if small else text) == pytest.approx(count * rate * 1e9 / 8)


@pytest.mark.parametrize(
    ("text", "gigabits"),
    [
        ("400 Gb/s x 8 per node", 3200),
        ("400Gbps x8", 3200),
        ("two 200 Gb/s HCAs per node", 400),
        ("dual 200Gb/s per node", 400),
        ("8*400Gb/s", 3200),
        ("EDR x4 per node", 400),
    ],
)
def test_the_number_of_links_may_be_a_word_or_follow_the_rate(text, gigabits):
    found = read_network(text, "h100", 8, 400e9)
    assert found.rate == pytest.approx(gigabits * 1e9 / 8)


@pytest.mark.parametrize("end", ["16 nodes", "16 servers", "2 hosts", "64 machines", "16 DGX nodes"])
def test_a_number_of_nodes_is_not_one_of_links(end):
    assert read_network(f"400G x {end}", "h100", 8, 50e9) == read_network("400G", "h100", 8, 50e9)


@pytest.mark.parametrize("text", ["400 Gb/s per 2 GPUs", "800 Gb/s bidirectional per GPU", "one HDR per pair of GPUs"])
def test_a_rate_of_several_devices_or_directions_is_not_called_stated(text):
    with pytest.raises(UnreadableError, match="not the rate of one device in one direction"):
        read_network(text, "h100", 8, 400e9)


@pytest.mark.parametrize(
    ("text", "gigabytes"),
    [
        ("3,200 Gb/s EFA per instance", 400), ("3.2 Tbps per node", 400), ("3.2 Tb/s", 400), ("3200 Gbps", 400),
        ("50 GB/s per GPU", 400), ("400 GB/s per node", 400), ("EFA v2", 400), ("EFAv2 (p5)", 400),
        ("8 NICs of 400 Gb/s", 400),
        ("NVLink 900 GB/s, 8x400Gbps InfiniBand", 400), ("NVSwitch + 8x NDR", 400), ("4x Slingshot-11 per node", 100),
        ("Slingshot 11, 4x200 Gb/s per node", 100), ("quad-rail HDR", 100), ("100 Gb/s Ethernet (TCP) per node", 12.5),
        ("8x ConnectX-7", 400), ("400/800G IB per GPU", 400), ("4x Omni-Path 100 per node", 17),
        ("8x200Gbps", 200), ("2x HDR per GPU", 400), ("400Gb/s NDR per GPU", 400),
    ],
)  # fmt: skip
def test_published_words_for_networks(text, gigabytes):
    assert network(text) == pytest.approx(gigabytes * 1e9)


SPELLINGS = {  # Gb/s of a node of eight, whose catalog has another rate
    3200: [
        "8x ConnectX-7 400 Gb/s per node", "8x ConnectX-7 400Gb/s", "8 x ConnectX-7 (400 Gb/s) per node",
        "8x NVIDIA ConnectX-7 NDR 400 Gb/s InfiniBand", "8 ConnectX-7 400 Gb/s NICs per node", "ConnectX-7 x8",
        "eight ConnectX-7 400 Gb/s adapters per node", "ConnectX-7 400 Gb/s per GPU", "one ConnectX-7 per GPU",
        "CX-7 400G per GPU", "8xCX7", "8× CX-7 NDR 400Gb/s", "ConnectX-7 (8x 400 Gb/s)", "ConnectX-7 8x400Gbps",
        "8x single-port ConnectX-7", "8x BlueField-3 400 Gb/s", "8x NDR", "8xNDR400 per node", "8 NDR ports per node",
        "8 NDR links per node", "InfiniBand NDR (8x 400 Gb/s)", "8x NDR InfiniBand (400 Gb/s each) per node",
        "NDR InfiniBand 3.2 Tb/s per node", "NDR InfiniBand 3200 Gbps", "NDR per GPU", "1x NDR per GPU",
        "2x HDR per GPU", "2x 200 Gb/s NICs per GPU", "two HDR links per GPU", "2 HDR links per GPU", "8-rail NDR",
        "8x 400 Gb/s (one per GPU)", "8x 400 Gb/s, 1 NIC per GPU", "32x EFA 100 Gb/s", "32x 100 Gb/s EFA per instance",
        "32 EFA interfaces of 100 Gb/s", "4x 100 Gb/s EFA per GPU", "EFA", "EFAv2", "EFA v3", "EFA 3200 Gb/s per node",
        "8x 400 Gb/s RoCEv2", "8 rails of 400 Gb/s", "8x 50 GB/s",
    ],
    1600: ["8x HDR", "8x ConnectX-6 200 Gb/s", "8x NDR200 per node", "HDR per GPU", "16x HDR100 per node"],
    800: ["4x HDR per node", "Mellanox ConnectX-6 HDR 200 Gb/s x 4 per node", "4x Slingshot-11 200 Gb/s"],
    400: ["EFA 400 Gb/s per node", "4x EFA 100 Gb/s", "one ConnectX-7 per node", "dual-rail HDR", "NDR per node"],
    200: ["HDR 200 Gb/s between nodes", "2x HDR100 per node", "ConnectX-6 Dx 100 Gb/s x2"],
}  # fmt: skip


@pytest.mark.parametrize("gigabits", SPELLINGS)
def test_adapters_and_generations_as_users_spell_them(gigabits):
    """The digits of a name are neither a number of links nor a rate; ``usual`` decides none of these."""
    for text in SPELLINGS[gigabits]:
        for spelt in (text, text if "GB/s" in text else text.lower()):
            assert network(spelt, usual=1e9) == pytest.approx(gigabits * 1e9 / 8), spelt


@pytest.mark.parametrize(
    "text",
    [
        "8x HDR per GPU", "16x HDR per GPU", "4x 400 Gb/s per GPU", "4x 400 Gb/s (one per GPU)",  # whose links?
        "1000x NDR per node", "400x NDR", "0x NDR per node",
        "4x dual-port ConnectX-7 400 Gb/s", "8x 400 Gb/s NICs per 8 GPUs",
    ],
)  # fmt: skip
def test_a_number_of_links_that_no_node_or_chip_has_is_refused(text):
    with pytest.raises(UnreadableError):
        read_network(text, "h100", 8, 400e9)


def test_efa_depends_on_the_chip():
    assert [network("EFA", chip=chip) / 1e9 for chip in ("a100", "h100", "trainium1")] == [50, 400, 100]


def test_slices_and_domains_are_no_rates():
    assert read_network("4 slice(s) ICI + DCN", "tpu", 4, 25e9).slices == 4
    assert read_network("NVL72 + 4x NDR per node", "gb200", 4, 200e9).domain == 72


@FEW
@given(GARBAGE)
@example("NVLink")
@example("")
@example("H100 node-to-node not stated")
@example("400 GBPS")
@example("8x HDR + 8x NDR per node")
@example("fast")
def test_a_network_without_a_rate_is_refused(text):
    words = ("hdr", "edr", "ndr", "xdr", "fdr", "qdr", "efa", "ici", "cx", "single", "node")
    assume(text == "400 GBPS" or text.startswith(("8x", "H100")) or not any(word in text.lower() for word in words))
    with pytest.raises(UnreadableError):
        read_network(text, "h100", 8, 400e9)


CHIPS = {
    "A100 40GB": [
        "A100 (40G)",
        "A100-40G",
        "A100-SXM-40GB",
        "A100 40 GB",
        "a100-sxm4-40gb",
        "NVIDIA A100-SXM4-40GB",
        "A100 SXM 40GB",
    ],
    "A100 80GB": [
        "A100-SXM-80GB",
        "NVIDIA A100 80GiB",
        "NVIDIA_A100-SXM4-80GB",
        "A100 80G SXM",
        "A100 80G",
        "A100",
        "A100 80GB SXM4",
    ],
    "A100 PCIe 80GB": ["A100 80GB PCIe", "A100-PCIE-80GB", "A100 PCIe"],
    "A100 PCIe 40GB": ["A100-PCIE-40GB", "A100 40GB PCI-E"],
    "A800 80GB": ["A800-SXM-80GB", "A800 80G", "A800x80G", "NVIDIA_A800-SXM4-80GB"],
    "H800 SXM": ["H800", "NVIDIA_H800-80GB", "H800-SXM-80GB"],
    "H20": ["H20", "NVIDIA H20 96GB"],
    "GH200 96GB": ["GH200", "GH200 96GB", "NVIDIA GH200 480GB"],
    "GH200 144GB": ["GH200-144GB", "GH200 144G"],
    "V100 16GB": ["Tesla V100-SXM2-16GB", "V100", "16G V100"],
    "V100 32GB": ["32G V100", "Tesla V100-SXM2-32GB", "V100 32 GB"],
    "T4": ["T4", "Tesla T4", "NVIDIA T4"],
    "L40S": ["L40S", "NVIDIA L40S 48GB"],
    "RTX 4090": ["RTX4090", "GeForce RTX 4090", "NVIDIA GeForce RTX 4090", "RTX 4090 24GB"],
    "RTX 5090": ["RTX 5090", "rtx-5090"],
    "MI250X": ["MI250X", "AMD Instinct MI250X"],
    "MI300X": ["AMD Instinct MI300X", "MI300X", "MI300X 192GB"],
    "MI325X": ["MI325X", "AMD MI325X"],
    "MI355X": ["MI355X"],
    "Gaudi 2": ["Intel Gaudi 2 (HL-225H)", "Gaudi2", "gaudi-2"],
    "Gaudi 3": ["Intel Gaudi 3", "Gaudi3"],
    "Max 1550": ["Intel Data Center GPU Max", "Data Center GPU Max 1550", "Intel Data Center GPU Max (tile)"],
    "TPU v2": ["TPU V2-32", "TPUv2"],
    "TPU v3": ["TPU V3-32", "tpu-v3"],
    "H100 SXM": [
        "H100-SXM-80GB",
        "H100 SXM5",
        "H100 SXM 500W",
        "NVIDIA H100 80GB HBM3",
        "h100_sxm",
        "DGX-H100",
        "H100 (p5.48xlarge)",
        "H100 80GB (8xH100)",
        "gpu-p5.48xlarge (H100)",
        "H100 80G SXM",
    ],
    "H200 SXM": ["H200-SXM-141GB", "H200 141GB", "H200"],
    "B200": ["B200-180GB", "NVIDIA B200", "HGX B200"],
    "GB200": ["GB200-186GB", "GB200 NVL72"],
    "GB300": ["GB300-288GB", "GB300 NVL72"],
    "Trainium1": ["Trainium1", "Trn1", "trn1.32xlarge", "AWS Trainium", "trn1n"],
    "Trainium2": ["Trainium2", "Trn2", "trn2.48xlarge", "trainium 2"],
    "TPU v4": ["TPU v4", "tpu-v4", "tpu-v4-1024", "TPUv4"],
    "TPU v5e": ["TPU v5e", "TPU v5 lite", "v5e", "tpu-v5litepod-256x4", "tpu-v5e-256-4"],
    "TPU v5p": ["TPU v5p", "v5p", "tpu-v5p-512"],
    "TPU v6e": ["TPU v6e", "Trillium", "tpu-v6e-256x4", "tpu-v6e-256"],
    "TPU 7x": ["TPU7x (Ironwood)", "Ironwood", "TPU v7x"],
}


@FEW
@given(st.sampled_from([(name, text) for name, texts in CHIPS.items() for text in texts]), st.data())
def test_spellings_of_chips(pair, data):
    name, text = pair
    spelled = data.draw(st.sampled_from([text, text.lower(), text.upper(), text.replace("-", "–"), text + " "]))
    if "." not in text:
        spelled = data.draw(st.sampled_from([spelled, spelled.replace(" ", "  "), spelled.replace("-", " ")]))
    assert read_chip(spelled, load_catalog(), 0).value.chip.name == name


@pytest.mark.parametrize("chip", [chip.name for chip in load_catalog().chips if chip.memory])
def test_every_chip_of_the_catalog_is_read(chip):
    assert read_chip(chip, load_catalog(), 8).value.chip.name == chip


@pytest.mark.parametrize("chip", [chip.name for chip in load_catalog().chips if not chip.memory])
def test_chips_whose_memory_the_catalog_lacks_are_refused_with_the_reason(chip):
    with pytest.raises(UnreadableError, match="the catalog has no memory"):
        read_chip(chip, load_catalog(), 8)


@pytest.mark.parametrize(("text", "name"), [("H100-PCIe-80GB", "H100 PCIe"), ("H100 NVL 94GB", "H100 NVL")])
def test_form_factors_are_chips_of_their_own(text, name):
    """Read as that chip, or refused by its name as long as the catalog lacks its memory: never as the SXM version."""
    try:
        read = read_chip(text, load_catalog(), 8).value.chip.name
    except UnreadableError as error:
        assert str(error).endswith(f"of {name}")
    else:
        assert read == name


@pytest.mark.parametrize("instance", [instance.name for instance in load_catalog().instances])
def test_every_instance_of_the_catalog_is_read(instance):
    assert read_chip(instance, load_catalog(), 0).value.instance.name == instance


@FEW
@given(GARBAGE)
@example("Z900")
@example("V900")
@example("MI100")
@example("Max 1100")
@example("Intel Data Center GPU Max 1100")
@example("Gaudi")
@example("RTX 4090 Laptop GPU")
@example("NVIDIA A100-SXM4-40GB MIG 1g.5gb")
@example("RTX 4090 Ti")
@example("TPU v1")
def test_chips_that_the_catalog_lacks_are_refused(text):
    with pytest.raises(UnreadableError, match="chip"):
        read_chip(text, load_catalog(), 8)


def test_power_limits_and_export_versions():
    """500 of 700 W leave (5/7)^(1/3) of the rate; H800 and A800 have NVLink of 200e9 bytes per second each way."""
    capped = read_chip("H100 SXM 500W", load_catalog(), 8)
    assert capped.value.speed == pytest.approx((5 / 7) ** (1 / 3)) and capped.sure == "implied" and capped.spread > 0
    assert read_chip("H100 SXM 700 W", load_catalog(), 8).value.speed == 1
    assert read_chip("A800-SXM-80GB", load_catalog(), 8).value.instance.link == 200
    assert read_chip("A100", load_catalog(), 8, "SXM4", "80GB (300W)").value.speed == pytest.approx((3 / 4) ** (1 / 3))


@pytest.mark.parametrize(
    ("text", "form", "memory", "name"),
    [
        ("A100", "", "40G", "A100 40GB"), ("A100", "SXM4", "80", "A100 80GB"), ("A100", "PCIe", "", "A100 PCIe 80GB"),
        ("V100", "SXM2", "32GB", "V100 32GB"), ("AMD Instinct MI300X", "", "206.14165 GB", "MI300X"),
        ("NVIDIA H100 80GB HBM3", "", "85.01789 GB", "H100 SXM"), ("Gaudi 2", "mezzanine card", "", "Gaudi 2"),
        ("A100 80GB SXM4", "SXM4", "80GB (400W)", "A100 80GB"),
    ],
)  # fmt: skip
def test_form_factor_and_memory_in_columns_of_their_own(text, form, memory, name):
    assert read_chip(text, load_catalog(), 8, form, memory).value.chip.name == name


@pytest.mark.parametrize(
    ("text", "form", "memory"),
    [
        ("H100", "", "96GB"),
        ("H100 96GB", "", ""),
        ("A100 80GB", "", "40GB"),
        ("H100", "a box", ""),
        ("H100", "", "much"),
    ],
)
def test_a_memory_or_form_that_contradicts_the_chip_is_refused(text, form, memory):
    """80 GB of a chip that has 80 GiB is the same; 96 is another product."""
    with pytest.raises(UnreadableError):
        read_chip(text, load_catalog(), 8, form, memory)


@pytest.mark.parametrize(("text", "dies"), [("Intel Data Center GPU Max (tile)", 12), ("MI250X (GCD)", 8)])
def test_dies_that_a_row_counts_as_chips(text, dies):
    """A die has half of the package's rate, memory and links; the network of the machine is the same."""
    whole, half = (read_chip(name, load_catalog(), 0).value for name in (text.partition(" (")[0], text))
    assert half.instance.chips == 2 * whole.instance.chips == dies and half.instance.network == whole.instance.network
    assert half.chip.devices == 1 and half.instance.link == whole.instance.link / 2
    assert half.chip.flops("bfloat16") == whole.chip.flops("bfloat16")  # of one torch device
    assert half.chip.memory.gib == whole.chip.memory.gib / 2


@FEW
@given(st.integers(1, 10**7), st.data())
def test_numbers(value, data):
    spelled = [
        str(value),
        f"{value:,}",
        f"{value:_}",
        f"{value}.0",
        f" {value} ",
        f"{value * 1000 // 1000}",
        f"{value}e0",
    ]
    assert parse_count(data.draw(st.sampled_from(spelled))) == value


@pytest.mark.parametrize(
    ("text", "value"), [("1.5k", 1500), ("2M", 2e6), ("7B", 7e9), ("1T", 1e12), ("2^20", 2**20), ("4e6", 4e6)]
)
def test_units(text, value):
    assert parse_number(text) == value
    assert read_sequence("8k").value == 8192 and read_sequence("128K tokens").value == 131072


@pytest.mark.parametrize(
    "text", ["", "64-128", "64..128", "-3", "nan", "inf", "1,2", "1,0000", "4 5", "k", "2^99", "1e99"]
)
def test_what_is_not_one_number_is_refused(text):
    with pytest.raises(UnreadableError):
        parse_number(text)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("none", "none"), ("No", "none"), ("full", "full"), ("Full (remat)", "full"), ("selective", "selective"),
        ("minimal", "selective"), ("minimal_flash", "none"), ("custom-offload", "full"), ("every layer", "full"),
        ("selective op", "full"), ("full (block-10)", "full"), ("attention only", "selective"), ("full remat", "full"),
    ],
)  # fmt: skip
def test_words_for_recomputation(text, policy):
    assert read_recompute(text).value.policy == policy
    assert read_recompute(text.upper()).value.policy == policy


@pytest.mark.parametrize(
    ("text", "stage"),
    [
        ("1", 1),
        ("3.0", 3),
        ("ZeRO-2", 2),
        ("zero3", 3),
        ("FSDP", 3),
        ("FULL_SHARD", 3),
        ("SHARD_GRAD_OP", 2),
        ("DDP", 0),
    ],
)
def test_words_for_sharding(text, stage):
    assert read_zero(text, "", False).value == stage


@pytest.mark.parametrize(
    ("text", "eight"),
    [("bf16", False), ("amp_bf16", False), ("BF16-mixed", False), ("fp8", True), ("MXFP8", True), ("fp8-cs", True),
     ("bf16 + fp8", True), ("amp_fp8", True), ("float8 (rowwise)", True)],
)  # fmt: skip
def test_words_for_precisions(text, eight):
    assert read_eight_bit(text).value is eight


@FEW
@given(st.text(alphabet="bcdfghjkmqrtvwz -_/é", min_size=1, max_size=20).filter(lambda text: text.strip(" -_/")))
@example("?!")
@example("fast")
@example("everything as usual")
def test_garbage_never_gets_a_default_in_silence(text):
    """Words that are in no vocabulary: their alphabet has no letter of full, none, selective, fsdp, amp, on."""
    for read in (read_recompute, read_eight_bit, lambda text: read_zero(text, "", False)):
        with pytest.raises(UnreadableError):
            read(text)


@pytest.mark.parametrize("text", ["", "?", "-", "n/a", "not stated", "unknown"])
def test_unstated_columns_are_assumptions_that_widen_the_interval(text):
    for reading in (read_recompute(text), read_eight_bit(text), read_zero(text, "", False)):
        assert reading.sure == "assumed" and reading.reason and reading.spread > 0
