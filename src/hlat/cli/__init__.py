"""The command line: one small module per verb. It parses, calls one function and prints."""

import sys
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hlat.cli import checkpoint, data, evaluate, hardware, model, plan, quickstart, recipe, rehearse, train
from hlat.cli.common import say
from hlat.config import HlatError
from hlat.runtime import INTERRUPTED

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class _Verbs(TyperGroup):
    """A user's mistake is one message and its exit code, never a traceback; nor is an interruption."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except HlatError as error:
            _complain(f"error: {error}")
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as interrupt:
            _complain(INTERRUPTED)
            raise typer.Exit(_INTERRUPTED) from interrupt


def _complain(message: str) -> None:
    with suppress(BrokenPipeError):
        sys.stdout.flush()  # what was said before stands before the complaint
    typer.echo(message, err=True)


app = typer.Typer(
    name="hlat",
    cls=_Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        import hlat

        say(f"hlat {hlat.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Pre-train LLaMA-class language models on the hardware you have, from one recipe file."""


for module in (quickstart, recipe, plan, rehearse, train, evaluate, model):
    module.register(app)
app.add_typer(data.app, name="data")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(hardware.app, name="hardware")
