"""The command line: one small module per verb. It parses, calls one function and prints."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hlat.cli import (
    checkpoint,
    compile,
    doctor,
    evaluate,
    hardware,
    model,
    plan,
    quickstart,
    recipe,
    rehearse,
    train,
)
from hlat.cli.common import complain, say
from hlat.cli.data import data_app
from hlat.cli.launch import launch_app
from hlat.cli.runs import register as register_runs
from hlat.runtime import HlatError, escape_controls, redact_value
from hlat.runtime.process import INTERRUPTED_MESSAGE

__all__ = ["app"]

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class _Verbs(TyperGroup):
    """Group of all verbs: a user's error or an interruption is one message and an exit code, never a traceback."""

    def make_context(self, *given: Any, **options: Any) -> Any:
        with _visible_usage():
            return super().make_context(*given, **options)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _visible_usage():
                return super().invoke(ctx)
        except HlatError as error:
            complain(f"error: {error}", "error")
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as interrupt:
            complain(INTERRUPTED_MESSAGE)
            raise typer.Exit(_INTERRUPTED) from interrupt


@contextmanager
def _visible_usage() -> Iterator[None]:
    """Make usage errors safe to print: they repeat arguments, which may hold secrets or control characters."""
    try:
        yield
    except Exception as error:
        if isinstance(message := getattr(error, "message", None), str) and hasattr(error, "format_message"):
            option = getattr(error, "option_name", "")  # typer's exceptions, which it does not all export
            hint = f". Overrides take no dashes: {option.lstrip('-')}=VALUE" if "." in option else ""
            error.message = escape_controls(redact_value(message) + hint)  # type: ignore[attr-defined]
        raise


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


for module in (quickstart, recipe, plan, rehearse, doctor, compile, train, evaluate, model):
    module.register(app)
register_runs(app)
app.add_typer(data_app, name="data")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(hardware.app, name="hardware")
app.add_typer(launch_app, name="launch")
