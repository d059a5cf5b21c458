"""The catalog: every figure has a source, and every chip is found by its exact name only."""

import re

import pytest
from pydantic import ValidationError

from hlat.hardware import Catalog, Instance, load_catalog, parse_cluster


def test_every_figure_is_positive_and_has_a_source() -> None:
    for chip in load_catalog().chips:
        for dtype, figure in chip.tflops.items():
            assert figure.dense > 0, (chip.name, dtype)
            source = load_catalog().sources[figure.source]
            assert re.search(r"https://[\w./-]+$", source), (chip.name, dtype, source)


def test_tf32_peaks_are_half_of_bf16_peaks() -> None:
    """A figure with sparsity would be twice too high. Tensor cores compute TF32 at half the rate of bf16.

    Datasheets round to two or three digits (B200: 1.1 PFLOP/s of TF32 for 2.25 of bf16), hence 3 %.
    """
    gpus = [chip for chip in load_catalog().chips if "tf32" in chip.tflops]
    assert gpus
    for chip in gpus:
        ratio = chip.tflops["tf32"].dense / chip.tflops["bfloat16"].dense
        assert ratio == pytest.approx(0.5, rel=0.03), chip.name
        assert chip.tflops["float32"].dense <= chip.tflops["tf32"].dense * 1.03, chip.name


@pytest.mark.parametrize(
    ("torch_name", "chip", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100 40GB", 312),
        ("A100-SXM4-80GB", "A100 80GB", 312),  # drivers before 460 omit the maker's name
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB", 312),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989.4),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756),
        ("NVIDIA H100 NVL", "H100 NVL", 835.5),
        ("NVIDIA H200", "H200 SXM", 989.5),
        ("NVIDIA B300 SXM6 AC", "B300", 2250),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", "RTX 5090", 209.5),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell", 500),
        ("AMD Instinct MI300X", "MI300X", 1307.4),
        ("AMD Instinct MI250X", "MI250X", 191.5),  # torch names the package, and means one of its two dies
    ],
)
def test_a_chip_is_found_by_the_name_that_torch_reports(torch_name: str, chip: str, tflops: float) -> None:
    found = load_catalog().chip_by_torch_name(torch_name)
    assert found is not None
    assert found.name == chip
    assert found.flops("bfloat16") == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    "torch_name",
    [
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",  # a seventh of an A100
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM-64GB",  # a custom chip with more cores
        "NVIDIA H100",
        "AMD Instinct MI455X",
        "",
    ],
)
def test_a_similar_name_is_not_the_chip(torch_name: str) -> None:
    assert load_catalog().chip_by_torch_name(torch_name) is None


@pytest.mark.parametrize(
    ("instance", "cores", "tflops"),
    [
        ("trn1.32xlarge", None, 95),
        ("trn1n.32xlarge\n", None, 95),
        ("trn2.48xlarge", None, 166.75),
        ("trn2.48xlarge", 1, 83.375),
    ],
)
def test_trainium_is_found_by_instance_type_with_peaks_per_torch_device(
    instance: str, cores: int | None, tflops: float
) -> None:
    """190 TFLOP/s in 2 cores; 667 in 8, two of which form a logical core by default (AWS Neuron documentation)."""
    chip = load_catalog().chip_by_instance_type(instance)
    assert chip is not None
    assert chip.flops("bfloat16", cores) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize("instance", ["p5.48xlarge", "trn9.48xlarge", "trn", "", "Standard PC (Q35 + ICH9, 2009)"])
def test_other_instance_types_give_no_chip(instance: str) -> None:
    assert load_catalog().chip_by_instance_type(instance) is None


def _catalog(**changes: object) -> dict[str, object]:
    chip = {"name": "X", "names": ["X 1"], "tflops": {"bfloat16": {"dense": 1.0, "source": "s"}}}
    return {"sources": {"s": "a paper"}, "chips": [chip | changes]}


@pytest.mark.parametrize(
    "changes",
    [
        {"tflops": {"bfloat16": {"dense": 1.0, "source": "another"}}},
        {"tflops": {"bfloat16": {"dense": 1.0}}},
        {"tflops": {"bfloat16": {"dense": -1.0, "source": "s"}}},
        {"tflops": {"bfloat16": {"dense": 0, "source": "s"}}},
        {"tflops": {"bfloat16": {"dense": float("nan"), "source": "s"}}},
        {"tflops": {}},
        {"names": []},
        {"names": ["X 1", "nvidia  x 1"]},
        {"cores": 8, "cores_per_device": 3},
        {"sparse_tflops": 2.0},
    ],
)
def test_an_inconsistent_catalog_is_refused(changes: dict[str, object]) -> None:
    Catalog.model_validate(_catalog())
    with pytest.raises(ValidationError):
        Catalog.model_validate(_catalog(**changes))


def test_every_source_is_cited_by_a_figure() -> None:
    catalog = load_catalog()
    assert catalog.source_keys() == catalog.sources.keys()


@pytest.mark.parametrize("instance", load_catalog().instances, ids=lambda instance: instance.name)
def test_a_plan_can_be_made_for_every_instance(instance: Instance) -> None:
    cluster = parse_cluster(f"{instance.name}:2", load_catalog())
    assert cluster.devices == 2 * cluster.devices_per_instance
    assert cluster.memory_bytes > 1e9 and cluster.memory_rate > 1e11
    # The fast links exceed a device's share of the network.
    assert cluster.link_rate > cluster.network_rate / cluster.devices_per_instance
    assert instance.prices.keys() or not instance.name.startswith(("p", "trn1"))


def test_names_are_matched_without_case_maker_and_spacing() -> None:
    catalog = load_catalog()
    assert catalog.chip("nvidia h100  sxm") is catalog.chip("H100 SXM") is not None
