"""Options that the verbs of all schedulers share."""

from pathlib import Path
from typing import Annotated

import typer

NodesOption = Annotated[int, typer.Option(help="Number of machines.", show_default=False)]
LeastOption = Annotated[
    int | None, typer.Option(metavar="N", help="Go on with as few machines as this if others are lost; default: all.")
]
NprocOption = Annotated[
    int | None, typer.Option(help="Processes per machine; default: one per accelerator of the instance, or one.")
]
InstanceOption = Annotated[
    str | None,
    typer.Option(help="Kind of machine in the catalog (hlat hardware list): sets variables, accelerators, --nproc."),
]
HardwareOption = Annotated[
    Path | None, typer.Option(help="Your own catalog, on top of the one that ships with hlat.", metavar="FILE")
]
EnvOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Variable of the processes; replaces the catalog's. Repeat for several."),
]
NameOption = Annotated[str | None, typer.Option(help="Name of the job; default: the run's.")]
GraceOption = Annotated[int, typer.Option(help="Seconds before the end at which the run is told to save.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted.")]
