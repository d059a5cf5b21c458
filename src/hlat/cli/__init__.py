"""The command line: one small module per verb. It parses, calls one function and prints."""

import sys

import typer

from hlat.cli import data, evaluate, model, quickstart, recipe, train
from hlat.config import HlatError

app = typer.Typer(
    name="hlat",
    help="Pre-train LLaMA-class language models on the hardware you have, from one recipe file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for module in (quickstart, recipe, train, evaluate, model):
    module.register(app)
app.add_typer(data.app, name="data")

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main() -> None:
    """Entry point: a user's mistake is one message and its exit code, never a traceback."""
    try:
        app(standalone_mode=True)
    except HlatError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted: what was complete is kept; the same command goes on from there", file=sys.stderr)  # noqa: T201
        sys.exit(INTERRUPTED)
