"""Clusters: parsing, figures per device, user catalogs, and error messages."""

from pathlib import Path

import pytest

from hlat.hardware import load_catalog, parse_cluster
from hlat.runtime.errors import HardwareError, HlatError


def test_hlats_cluster_is_2048_devices_of_16_gib() -> None:
    """64 trn1.32xlarge, 1024 chips: figures from the HLAT paper and AWS."""
    cluster = parse_cluster("trn1.32xlarge:64", load_catalog())
    assert (cluster.chips, cluster.devices, cluster.devices_per_instance, cluster.domain) == (1024, 2048, 32, 32)
    assert cluster.memory_bytes == 16 * 2**30
    assert cluster.price() == ("on-demand", pytest.approx(64 * 21.50))
    assert cluster.price("capacity-block") == ("capacity-block", pytest.approx(64 * 9.532))


def test_a_trainium_2_device_is_two_cores() -> None:
    assert parse_cluster("trn2.48xlarge:1", load_catalog()).devices == 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trn1.32xlarge:0", "at least one"),
        ("trn1.32xlarge:-3", "at least one"),
        ("trn1.32xlarge", "INSTANCE:N"),
        (":8", "INSTANCE:N"),
        ("trn1.32xlarge:many", "not a number"),
        ("trn1.32xlarge:1.5", "not a number"),
        ("trn1.33xlarge:8", "trn1.32xlarge"),
        ("quantum:8", "hlat hardware list"),
    ],
)
def test_malformed_clusters_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(HlatError, match=r".") as refused:
        parse_cluster(text, load_catalog())
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


_USER_CATALOG = """
sources: {me: measured by us}
chips:
  - name: A100 80GB
    names: [NVIDIA A100-SXM4-80GB]
    family: ampere
    memory: {gib: 70, gb_per_second: 1800, source: me}
    tflops: {bfloat16: {dense: 300, source: me}}
instances:
  - name: our-box
    chip: A100 80GB
    chips: 4
    domain: 4
    link: 250
    network: 12.5
    source: me
    prices: {own: {usd_per_hour: 3.5, seen: 2026-01-01, source: me}}
    failures: {per_day: 0.001, source: me}
"""


def test_a_users_file_adds_and_replaces_entries(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(_USER_CATALOG, encoding="utf-8")
    catalog = load_catalog(str(file))
    cluster = parse_cluster("our-box:2", catalog)
    assert (cluster.devices, cluster.price()) == (8, ("own", 7.0))
    assert parse_cluster("p4de.24xlarge:1", catalog).memory_bytes == 70 * 2**30, (
        "a shipped instance with the user's chip"
    )
    assert parse_cluster("p4d.24xlarge:1", catalog).memory_bytes == 40 * 2**30
    assert parse_cluster("p4de.24xlarge:1", load_catalog()).memory_bytes == 80 * 2**30, (
        "the shipped catalog is unchanged"
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("usd_per_hour: 3.5", "usd_per_hour: -3.5", "our-box"),
        ("dense: 300", "dense: 0", "A100 80GB"),
        ("chip: A100 80GB\n    chips", "chip: A200\n    chips", "A200"),
        ("source: me}}\n    failures", "source: you}}\n    failures", "you"),
        ("chips: 4", "chips: 0", "our-box"),
        ("link: 250", "links: 250", "links"),
        ("instances:", "machines:", "sections"),
        ("sources: {me: measured by us}", "- 1", "mapping"),
        ("{me: measured", "{{me: measured", "YAML"),
    ],
)
def test_mistakes_in_a_users_file_are_reported_by_entry(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in _USER_CATALOG
    file = tmp_path / "own.yaml"
    content = "- 1" if new == "- 1" else _USER_CATALOG.replace(old, new)
    file.write_text(content, encoding="utf-8")
    with pytest.raises(HlatError) as refused:
        load_catalog(str(file))
    assert message in str(refused.value)
    assert str(file) in str(refused.value)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(HlatError, match=r"gone\.yaml"):
        load_catalog(str(tmp_path / "gone.yaml"))


def test_an_unknown_price_is_an_error_or_none() -> None:
    with pytest.raises(HlatError, match="no spot price is known"):
        parse_cluster("p5.48xlarge:1", load_catalog()).price("spot")
    assert parse_cluster("gb200:1", load_catalog()).price() is None


def test_rates_of_a_core_are_its_share_of_the_chip() -> None:
    """Trainium 1: two cores; 880 GB/s of memory, 192 GB/s of NeuronLink per chip, 100 GB/s of network per instance."""
    core = parse_cluster("trn1.32xlarge:1", load_catalog())
    assert (core.memory_rate, core.link_rate, core.network_rate) == (440e9, 96e9, 100e9)


@pytest.mark.parametrize(
    ("text", "per", "chips", "devices", "domain"),
    [
        ("8xrtx4090:1", "instance", 8, 8, 8),
        ("8xrtx4090:2", "instance", 16, 16, 8),
        ("rtx4090:4", "chip", 4, 4, 4),
        ("rtx4090:16", "chip", 16, 16, 8),
        ("rtx4090:1", "instance", 1, 1, 1),
        ("4xh100:1", "instance", 4, 4, 4),
        ("2xmi250x:1", "instance", 2, 4, 4),
    ],
)
def test_machines_with_another_number_of_chips(text, per, chips, devices, domain):
    cluster = parse_cluster(text, load_catalog(), per)
    assert (cluster.chips, cluster.devices, cluster.domain) == (chips, devices, domain)


def test_a_machine_of_several_cards_fails_as_often_as_they_do():
    one, eight = (parse_cluster(text, load_catalog()).instance for text in ("l40s:1", "8xl40s:1"))
    assert eight.failures.per_day == pytest.approx(8 * one.failures.per_day) and eight.link == one.link


@pytest.mark.parametrize("text", ["9xrtx4090:1", "0xrtx4090:1", "16xh100:1", "8xnothing:1"])
def test_a_machine_that_cannot_have_so_many_chips_is_refused(text):
    with pytest.raises(HardwareError):
        parse_cluster(text, load_catalog())


def test_cards_that_fill_no_machines_are_refused():
    with pytest.raises(HardwareError, match="up to 8"):
        parse_cluster("rtx4090:12", load_catalog(), "chip")
