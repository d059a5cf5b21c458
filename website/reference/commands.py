"""Page of every verb of the command line with its arguments and options, as the parser has them."""

import typing
from collections.abc import Iterator
from typing import Any

import typer

from hlat.cli import app


def verbs() -> list[tuple[str, Any]]:
    """Return (words, command) of every verb, such as ``data prepare``, in the order of ``hlat --help``."""
    return list(_verbs(typer.main.get_command(app), ""))


def commands_page() -> str:
    """Return the page."""
    lines = [
        "# Command line",
        "",
        "Every verb with its arguments and options, generated from the parser; `hlat VERB --help` prints the same.",
        "`hlat --version` names versions and devices, `hlat --install-completion` completes verbs in your shell.",
        "[Exit codes](exit-codes.md) have a page of their own.",
        "",
        "| verb | purpose |",
        "|---|---|",
    ]
    found = verbs()
    lines += [f"| [`hlat {words}`](#{_anchor(words)}) | {_summary(verb.help or '')} |" for words, verb in found]
    for words, verb in found:
        lines += ["", f"## `hlat {words}` {{#{_anchor(words)}}}", "", _paragraphs(verb.help or ""), ""]
        lines += ["```text", _usage(words, verb), "```", ""]
        if rows := [row for parameter in verb.params if (row := _row(parameter)) is not None]:
            lines += ["| argument or option | value | default | meaning |", "|---|---|---|---|", *rows]
    return "\n".join([*lines, ""])


def _verbs(command: Any, words: str) -> Iterator[tuple[str, Any]]:
    for name, inner in command.commands.items():
        path = f"{words} {name}".strip()
        if hasattr(inner, "commands"):
            yield from _verbs(inner, path)
        elif not inner.hidden:
            yield path, inner


def _usage(words: str, verb: Any) -> str:
    with verb.make_context(words, [], resilient_parsing=True) as context:
        return " ".join(["hlat", words, *verb.collect_usage_pieces(context)])


def _row(parameter: Any) -> str | None:
    if getattr(parameter, "hidden", False) or parameter.name == "help":
        return None
    is_option = parameter.param_type_name == "option"
    name = ", ".join(parameter.opts) if is_option else parameter.name.upper()
    if is_option and parameter.secondary_opts:
        name += " / " + ", ".join(parameter.secondary_opts)
    default = parameter.default
    shown = "required" if parameter.required else ""
    if not parameter.required and default not in (None, False, (), []) and not callable(default):
        shown = f"`{default}`"
    return f"| `{name}` | {_cell(_value(parameter, is_option))} | {_cell(shown)} | {_cell(parameter.help or '')} |"


def _value(parameter: Any, is_option: bool) -> str:
    if is_option and parameter.is_flag:
        return "none"
    kind = parameter.type_descriptor.annotation
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(kind))
    several = ", several" if parameter.nargs == -1 or parameter.multiple else ""
    kind = next(iter(typing.get_args(kind)), kind)
    return (parameter.metavar or {int: "whole number", float: "number"}.get(kind, "text")) + several


def _anchor(words: str) -> str:
    return words.replace(" ", "-")


def _summary(text: str) -> str:
    return _cell(text.replace("\b", "").partition("\n\n")[0])


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.replace("\b", "").split("\n\n")).replace("<", "&lt;")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
