"""The command line. A verb parses, calls one function and prints. Verbs that belong together share a module."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hlat.cli import checkpoint, doctor, evaluate, hardware, ladder, plan, recipe, runs, train
from hlat.cli.data import data_app
from hlat.cli.launch import launch_app
from hlat.cli.options import current_options, hinted, process_options
from hlat.cli.terminal import LOG_ENV, complain, say
from hlat.runtime.errors import HlatError, StorageError
from hlat.runtime.logs import print_json_lines
from hlat.runtime.process import INTERRUPTED_MESSAGE
from hlat.runtime.terminal import VERBOSE_ENV, escape_controls
from hlat.runtime.urls import redact_value

__all__ = ["app"]

_COMPLETION = ("--install-completion", "--show-completion")
_NOTICES = "hlat.renamed"
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class _Verbs(TyperGroup):
    """Group of all verbs: a user's error or an interruption is one message and an exit code, never a traceback."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if (found := super().get_command(ctx, cmd_name)) is not None:
            _name_flags_plainly(found, ctx)
        return found

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)
        _show_without_type(params)
        return params

    def make_context(self, info_name: str | None, args: list[str], *given: Any, **options: Any) -> Any:
        with _visible_usage():
            if args and args[0] in _COMPLETION:
                _complete(args[0], args[1] if len(args) > 1 else None)
            words, notices = current_options(self, args)
            context = super().make_context(info_name, words, *given, **options)
            context.meta[_NOTICES] = notices
            return context

    def invoke(self, ctx: Any) -> Any:
        try:
            with _visible_usage():
                return super().invoke(ctx)
        except HlatError as error:
            complain(f"error: {error}{self._process_options(ctx, error)}", "error")
            raise typer.Exit(error.exit_code) from error
        except PermissionError as error:
            # Without a name of a file nobody could do anything: a defect, whose traceback is wanted.
            if error.filename is None:
                raise
            complain(
                f"error: {error.filename}: permission denied. Name another path, or ask for the permission.", "error"
            )
            raise typer.Exit(StorageError.exit_code) from error
        except KeyboardInterrupt as interrupt:
            complain(INTERRUPTED_MESSAGE)
            raise typer.Exit(_INTERRUPTED) from interrupt

    def _process_options(self, ctx: Any, error: HlatError) -> str:
        # A problem may be solved by another number of processes, which each verb sets by other options.
        if not any(fix.path == "world" for problem in getattr(error, "problems", ()) for fix in problem.fixes):
            return ""
        options = process_options(super().get_command(ctx, ctx.invoked_subcommand or ""))
        shown = " or ".join(options)
        # Under torchrun, torchrun starts the processes.
        if options and "TORCHELASTIC_RUN_ID" in os.environ:
            shown = "torchrun's --nproc-per-node and --nnodes"
        return f"\n  The number of processes is set by {shown}." if shown else ""


def _complete(option: str, shell: str | None) -> None:
    """Print or install completion for a shell, by default that which has started this process, and end."""
    from shellingham import ShellDetectionFailure, detect_shell  # type: ignore[import-untyped]
    from typer._completion_shared import get_completion_script, install

    try:
        # typer alone takes no name, and fails where it sees no shell.
        name = shell or str(detect_shell()[0])
    except ShellDetectionFailure:  # cron, CI, a container's first process
        raise typer.BadParameter(f"no shell has started this command. Name one: hlat {option} bash") from None
    if option == "--show-completion":
        say(get_completion_script(prog_name="hlat", complete_var="_HLAT_COMPLETE", shell=name))
    else:
        say(f"{name} completion installed in {install(name, 'hlat')[1]}; it works in the next terminal")
    raise typer.Exit


def _name_flags_plainly(command: Any, ctx: Any) -> None:
    _show_without_type(command.get_params(ctx))
    for below in getattr(command, "commands", {}).values():
        _name_flags_plainly(below, ctx)


def _show_without_type(parameters: Any) -> None:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""


@contextmanager
def _visible_usage() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(getattr(error, "message", None), str) and hasattr(error, "format_message"):
            # Usage errors repeat arguments, which may hold secrets or control characters.
            error.message = message = escape_controls(redact_value(hinted(error)))  # type: ignore[attr-defined]
            if os.environ.get(LOG_ENV) == "json" and type(error).__name__ != "NoArgsIsHelpError":
                print_json_lines()  # a box of lines is no error to a program that reads them
                complain(f"error: {message}", "error")
                raise typer.Exit(getattr(error, "exit_code", 2)) from error
        raise


app = typer.Typer(
    name="hlat",
    cls=_Verbs,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Variables: HLAT_LOG=json is --log-json, HLAT_VERBOSE=1 is -v; NO_COLOR=1 leaves colours out; HF_HOME, "
    "HF_TOKEN and HF_HUB_OFFLINE=1 are those of the Hugging Face Hub. hlat sets others for its own processes.",
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        say(_versions())
        raise typer.Exit


def _ask_for_json(wanted: bool) -> None:
    if wanted:
        # In the environment, so that processes that this one starts do the same.
        os.environ[LOG_ENV] = "json"


def _versions() -> str:
    import platform
    from pathlib import Path

    import hlat
    from hlat.runtime.backend.table import driver_versions
    from hlat.runtime.version import installed_version

    # torch is not imported, which takes a second, and no device is opened.
    torch = installed_version("torch") or "not installed"
    drivers = [f"{name} (driver {number})" for name, number in driver_versions().items()]
    package = Path(hlat.__file__).parent
    pages = (folder / "docs" / "README.md" for folder in (package, package.parents[1]))  # installed, or a checkout
    lines = [
        f"hlat {hlat.__version__}",
        f"torch {torch}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        f"devices: {', '.join([*drivers, 'the processor'])}",
        *(f"documentation: {page}" for page in pages if page.is_file()),
    ]
    return "\n".join(lines)


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print versions and devices.")
    ] = False,
    log_json: Annotated[
        bool,
        typer.Option(
            "--log-json",
            callback=_ask_for_json,
            is_eager=True,  # mistakes in other options are JSON lines, too
            help="Print messages, errors and progress as JSON lines, as HLAT_LOG=json does.",
        ),
    ] = False,
) -> None:
    """Pre-train LLaMA-class language models on the hardware you have, from one recipe file."""
    if (asked := os.environ.get(LOG_ENV, "")) not in ("", "json", "text"):
        complain(f"warning: {LOG_ENV}={asked} has no effect; it takes json or text.")
    if (asked := os.environ.get(VERBOSE_ENV, "")) not in ("", "0", "1"):
        complain(f"warning: {VERBOSE_ENV}={asked} is taken for 1; it takes 0 or 1.")
    for name in sorted(set(os.environ) - {LOG_ENV, VERBOSE_ENV}):
        # hlat sets others for its own processes: only misspelt ones are reported.
        if name.startswith("HLAT_") and (close := get_close_matches(name, (LOG_ENV, VERBOSE_ENV), n=1, cutoff=0.8)):
            complain(f"warning: {name} has no effect. Did you mean {close[0]}?")
    if os.environ.get(LOG_ENV) == "json":
        print_json_lines()
    for notice in context.meta.get(_NOTICES, ()):
        complain(notice)  # only now it is known whether messages are JSON lines


for module in (recipe, plan, doctor, train, ladder, runs, evaluate, checkpoint):
    module.register(app)
app.add_typer(data_app, name="data")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(hardware.app, name="hardware")
app.add_typer(launch_app, name="launch")

_PANELS = {
    "Begin": ("quickstart", "init", "check", "schema", "recipe"),
    "Plan": ("plan", "ladder", "rehearse", "hardware"),
    "Data": ("data",),
    "Train": ("train", "fork", "sweep", "launch", "doctor", "compile"),
    "Watch": ("report", "runs", "show", "compare"),
    "Use the model": ("evaluate", "generate", "checkpoint", "average", "import", "export"),
}
"""Groups of verbs in help; a verb in none of them is listed under "Commands"."""

_entries: list[Any] = [*app.registered_commands, *app.registered_groups]
for _entry in _entries:
    _name = _entry.name or getattr(_entry.callback, "__name__", "")
    _entry.rich_help_panel = next((panel for panel, names in _PANELS.items() if _name in names), "Commands")
