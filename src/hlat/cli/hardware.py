"""``hlat hardware list|show|quotes|measure``: the catalog, its prices, and an entry for this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hlat.cli.options import HardwareOption, check_outputs, write_output
from hlat.cli.terminal import ready, say
from hlat.runtime.terminal import plural

if TYPE_CHECKING:
    from hlat.hardware import Catalog, Chip, Instance

_HINT = """# Measured by hlat; docs/planning.md describes the fields. Correct by hand, under instances:
#   network: bandwidth of the machine to others, in 10^9 bytes per second;  failures.per_day: of the machine
#   prices: {own: {usd_per_hour: 3.5, seen: 2026-01-31, source: measured}}
"""

app = typer.Typer(help="Catalog of chips, instances and prices that the planner uses.", no_args_is_help=True)


@app.command("list")
def list_command(hardware: HardwareOption = None) -> None:
    """List the instances that plans can be made for."""
    from hlat.hardware import load_catalog

    ready()
    catalog = load_catalog(hardware)
    say(f"{'instance':19} {'chips':>5}  {'chip':14} {'16-bit TFLOP':>12} {'GiB':>5} {'USD/h':>8}  price")
    for one in catalog.instances:
        chip = catalog.chip(one.chip)
        assert chip is not None, "the catalog has been validated"
        kind, price = next(((kind, f"{p.usd_per_hour:.2f}") for kind, p in one.prices.items()), ("not known", ""))
        rate = chip.tflops.get(chip.sixteen_bit or "")
        gib = "" if chip.memory is None else f"{chip.memory.gib:g}"
        say(f"{one.name:19} {one.chips:5}  {chip.name:14} {rate.dense if rate else 0:12g} {gib:>5} {price:>8}  {kind}")


@app.command("show")
def show_command(
    name: Annotated[str, typer.Argument(help="Name of an instance or a chip.", show_default=False)],
    hardware: HardwareOption = None,
) -> None:
    """Show every figure of an instance or a chip, each with its source."""
    from hlat.hardware import load_catalog, parse_cluster

    ready()
    catalog = load_catalog(hardware)
    chip = catalog.chip(name) or catalog.chip_by_torch_name(name)
    if chip is None:
        parse_cluster(f"{name}:1", catalog)  # raises the error that names similar instances
        instance = catalog.instance(name)
        assert instance is not None, "it has just been parsed"
        _say_instance(instance, catalog)
        chip = catalog.chip(instance.chip)
    assert chip is not None, "the catalog has been validated"
    _say_chip(chip, catalog)


def _say_instance(one: "Instance", catalog: "Catalog") -> None:
    say(f"instance {one.name}: {one.chips} x {one.chip}")
    say(f"  fast links  {one.link:g} GB/s per chip and direction, among {plural(one.domain, 'chip')}")
    if one.up_to is not None:
        say(f"  chips       up to {one.up_to}: {one.up_to}x{one.name}:1 is one machine of so many")
    say(f"  network     {one.network:g} GB/s per instance and direction")
    say(f"              {catalog.sources[one.source]}")
    for kind, price in one.prices.items():
        say(f"  {kind:<14} {price.usd_per_hour:.2f} USD per hour, seen {price.seen}: {catalog.sources[price.source]}")
    if not one.prices:
        say("  price       unknown: put it into your own catalog (--hardware)")
    say(f"  failures    {one.failures.per_day:g} per instance and day: {catalog.sources[one.failures.source]}")


def _say_chip(chip: "Chip", catalog: "Catalog") -> None:
    say(f"chip {chip.name}: {chip.devices} torch device{'s' if chip.devices > 1 else ''}, family {chip.family}")
    for dtype, figure in chip.tflops.items():
        say(f"  {dtype:11} {figure.dense:g} TFLOP/s dense: {catalog.sources[figure.source]}")
    if chip.memory is not None:
        memory = chip.memory
        say(f"  memory      {memory.gib:g} GiB at {memory.gb_per_second:g} GB/s: {catalog.sources[memory.source]}")
    if chip.power is not None:
        say(f"  power       {chip.power.watts:g} W: {catalog.sources[chip.power.source]}")
    if chip.device is None and chip.family != "measured":
        say("  backend     none in hlat: plans are for comparison only")
    if chip.reached is not None:
        shares = ", ".join(f"{d} {v:.1%}" for d, v in chip.reached.model_dump().items() if d != "source" and v)
        say(f"  reached     {shares} of the peak by large products: {catalog.sources[chip.reached.source]}")


@app.command("quotes")
def quotes_command(hardware: HardwareOption = None) -> None:
    """Print the prices of the catalog as a file for hlat plan --quotes, to put your own into."""
    from hlat.hardware import load_catalog, quotes_text

    ready()
    say(quotes_text(load_catalog(hardware)).rstrip())


@app.command("measure")
def measure_command(
    to: Annotated[Path, typer.Option("--to", help="File to write; must not exist.")],
    name: Annotated[str, typer.Option(help="Name of this machine in the catalog.")] = "this-machine",
) -> None:
    """Measure matrix products, memory and collectives of this machine, and write a catalog with it."""
    import yaml

    from hlat.hardware import measure_machine
    from hlat.runtime.backend.device import choose_device
    from hlat.runtime.errors import StorageError
    from hlat.runtime.process import RankInfo

    ready()
    if to.exists():
        raise StorageError(f"{to} exists; name a new file, or remove it first")
    check_outputs((to,))
    machine = measure_machine(choose_device("auto", RankInfo()))
    for dtype, rate in machine.flops.items():
        say(f"{dtype:9} {rate / 1e12:10.4f} TFLOP/s in products")
    say(f"memory    {machine.memory_rate / 1e9:10.2f} GB/s in copies, {machine.memory_bytes / (1 << 30):.1f} GiB")
    if machine.link_rate is not None:
        say(f"links     {machine.link_rate / 1e9:10.2f} GB/s sent by each process in an all-reduce")
    write_output(to, _HINT + yaml.safe_dump(machine.catalog(name), sort_keys=False))
    say(f"written to {to}; correct network, prices and failures in it, then use --hardware {to} --cluster {name}:1")
