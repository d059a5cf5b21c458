"""File system and energy of a site: units, sources, and LLaMA's own estimates."""

import pytest

from hlat.hardware import HOST_SHARE, Site, load_catalog, parse_cluster, parse_site, with_network
from hlat.runtime.errors import HardwareError


@pytest.mark.parametrize(
    ("text", "rate", "per"),
    [
        ("5GB/s", 5e9, "cluster"),
        ("5 GB/s per cluster", 5e9, "cluster"),
        ("2GB/s/instance", 2e9, "instance"),
        ("800 MB/s per instance", 8e8, "instance"),
        ("40Gb/s", 5e9, "cluster"),
        ("40gbit/s", 5e9, "cluster"),
        ("5gB/s", 5e9, "cluster"),
        ("1GiB/s", 2**30, "cluster"),
    ],
)
def test_rates_are_read_in_the_spellings_that_people_use(text: str, rate: float, per: str) -> None:
    storage = parse_site(text).storage
    assert storage is not None and (storage.bytes_per_second, storage.per) == (rate, per)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("5gb/s", "5GB/s for bytes, or 5Gbit/s for bits"),
        ("800 mb/s per instance", "800MB/s for bytes"),
        ("1gib/s", "1GiB/s for bytes, or 1Gibit/s"),
    ],
)
def test_lower_case_throughout_leaves_bits_and_bytes_open(text: str, says: str) -> None:
    with pytest.raises(HardwareError, match=f"--storage {text}: .* may be bits or bytes; write {says}"):
        parse_site(text)


def test_a_rate_per_instance_grows_with_the_cluster_and_the_network_is_its_limit() -> None:
    one, many = (parse_cluster(f"p4d.24xlarge:{count}", load_catalog()) for count in (1, 16))
    whole, each, beyond = (parse_site(text).storage for text in ("5GB/s", "2GB/s/instance", "10TB/s"))
    assert (whole.of(one), whole.of(many)) == (5e9, 5e9)
    assert (each.of(one), each.of(many)) == (2e9, 32e9)
    assert beyond.of(one) == 50e9, "4 x 100 Gb/s of the instance"


@pytest.mark.parametrize("arguments", [("5",), ("0GB/s",), ("fast",), (None, 0.9), (None, 11.0)])
def test_bad_sites_are_refused(arguments: tuple) -> None:
    with pytest.raises(HardwareError, match=r"--storage|--pue"):
        parse_site(*arguments)


def test_the_energy_of_llama() -> None:
    """Table 15 of LLaMA: 1,022,362 hours of an A100 80GB at 400 W and a PUE of 1.1 are 449 MWh, without hosts."""
    chip = parse_cluster("a100-80gb:1", load_catalog())
    watts = Site(pue=1.1).watts(chip)
    assert watts is not None
    assert 1_022_362 * watts / 8 / (1 + HOST_SHARE) / 1e6 == pytest.approx(449, rel=5e-3)


def test_a_machine_of_eight_h100_draws_what_was_measured_at_most() -> None:
    """8.4 kW in training, 10.2 kW on the plate (Latif et al. 2025)."""
    watts = Site(pue=1.0).watts(parse_cluster("h100:1", load_catalog()))
    assert watts == pytest.approx(8400)
    assert Site().watts(parse_cluster("trn1.32xlarge:1", load_catalog())) is None


@pytest.mark.parametrize(
    "text",
    [
        *("400 GB/s", "400GB/s", "3200 Gb/s", "3.2 Tb/s", "8x400 Gb/s", "8 x 400Gbps", "400 GB/s per node"),
        *("8x ConnectX-7 400 Gb/s per node", "8x NDR InfiniBand 400 Gb/s/machine"),
    ],
)
def test_a_network_is_read_in_the_spellings_of_data_sheets(text: str) -> None:
    """Eight adapters of 400 Gb/s are 400 GB/s; the 7 of an adapter's name is no rate."""
    catalog = with_network(load_catalog(), text)
    assert {instance.network for instance in catalog.instances} == {400.0}


@pytest.mark.parametrize(
    "text", ["200", "ConnectX-7", "8x ConnectX-7", "0 GB/s", "8x400 Gb/s per GPU", "400 gb/s", "x400 Gb/s"]
)
def test_what_may_be_another_network_is_refused(text: str) -> None:
    with pytest.raises(HardwareError, match=f"--network {text}: "):
        with_network(load_catalog(), text)
