"""Options of verbs beyond typer: those of several verbs, checks before anything is computed, hints for wrong ones.

options of the same name in several verbs -> one of the objects below: the same help, the same meaning
words of the command line --current_options--> the same with today's names of options, and what was renamed
verbs that write files -> check_outputs -> write_output
error of the parser --hinted--> its message with what would work: verbs and options of other programs, and what
they are here; words of libraries are left out
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

RANGE = "N or MIN:MAX"
NodesOption = Annotated[
    str,
    typer.Option(
        metavar=RANGE, help="Number of hosts; MIN:MAX goes on without those that are lost, and takes them back."
    ),
]
StageOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Stage of a recipe with stages; default: all of them.")
]
WorldOption = Annotated[
    int | None,
    typer.Option(min=1, help="World size of the run: one process per accelerator, on any machines."),
]
NodeOption = Annotated[
    int | None,
    typer.Option(min=0, help="Number of this host, from 0; default: that of Slurm, Kubernetes or torchrun."),
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
AnywayOption = Annotated[
    bool, typer.Option("--anyway", help="Only warn of a run that does not fit into the memory of the instance.")
]
ProgramOption = Annotated[
    str | None,
    typer.Option(help='Command that runs hlat there, as in "apptainer exec --nv image.sif hlat".'),
]
SbatchOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "--sbatch",
        metavar="NAME=VALUE",
        help="Any other option of sbatch, as in constraint=ib or exclusive. Repeat for several.",
    ),
]
PriceOption = Annotated[
    str | None,
    typer.Option(
        metavar="KIND", help="on-demand, capacity-block, reserved, spot, own; or USD per hour of a chip: 2.10/h."
    ),
]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free one.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def check_outputs(paths: Sequence[Path | None]) -> None:
    """Raise StorageError if a file could not be written where it is asked for."""
    from hlat.runtime.errors import StorageError

    problems = list(_unwritable(path for path in paths if path is not None))
    if problems:
        raise StorageError("\n".join(problems))


def write_output(path: Path, text: str) -> None:
    """Write a file that was asked for; StorageError if that fails."""
    from hlat.runtime.errors import StorageError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}") from error


def _unwritable(paths: Iterator[Path]) -> Iterator[str]:
    for path in paths:
        if path.is_dir():
            yield f"{path} is a folder; name a file"
        elif not path.absolute().parent.is_dir():
            yield f"{path} cannot be written: there is no folder {path.absolute().parent}"


RENAMED = {
    "init": {"--hours": "--time", "--column": "--text-column"},
    "plan": {"--html": "--to", "--seq": "--sequence-length"},
    "rehearse": {"--world-size": "--world"},
    "compile": {"--out": "--to", "--from": "--unpack"},
    "evaluate": {"--out": "--to", "--max-new-tokens": "--max-tokens"},
    "data show": {"--tokens": "--max-tokens"},
    "launch slurm": {"--output": "--to", "--least": "--nodes"},
    "launch kubernetes": {"--least": "--nodes"},
    "launch local": {"--least": "--nodes"},
}
"""Options by verb under the names that they had in 0.1; they are accepted for a release, with a line of notice."""
_LEAST = "--least"


def current_options(command: Any, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Rename old options in the words of a command line; return the words, and a sentence for each old one.

    ``--least M`` became part of ``--nodes``: it is put in front of the number there, as in ``--nodes M:N``.
    """
    verb, command, at = _verb_of(command, words)
    renamed = RENAMED.get(verb, {})
    with_value = {name for each in getattr(command, "params", ()) if not _is_flag(each) for name in each.opts}
    found, notices, least = list(words[:at]), list[str](), ""
    rest = iter(words[at:])
    for word in rest:
        if word == "--":
            found += [word, *rest]
            break
        old, equals, value = word.partition("=")
        name = renamed.get(old, old)
        if name != old:
            notices.append(f"{old} is now {name}{' MIN:MAX' if old == _LEAST else ''}")
        # A value may look like an option, as in --sbatch --output=x.
        values = [next(rest, "")] if (name in with_value or name != old) and not equals else []
        if name != old and old == _LEAST:
            least = value or "".join(values)
        else:
            found += [f"{name}{equals}{value}", *values]
    return (_with_least(found, least) if least else found), notices


def _is_flag(parameter: Any) -> bool:
    return getattr(parameter, "is_flag", False) or parameter.param_type_name == "argument"


def _verb_of(command: Any, words: Sequence[str]) -> tuple[str, Any, int]:
    """Return the verb that words name, its command, and the place after it."""
    names = list[str]()
    for place, word in enumerate(words):
        if not word.startswith("-") and (command := getattr(command, "commands", {}).get(word)) is not None:
            names.append(word)
            if not getattr(command, "commands", None):
                return " ".join(names), command, place + 1
    return "", None, len(words)


def _with_least(words: list[str], least: str) -> list[str]:
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--nodes":
            number = value if equals else next(iter(words[place + 1 :]), "")
            return [*words[:place], f"--nodes={least}:{number}", *words[place + (1 if equals else 2) :]]
    # hlat launch local counts the hosts that are named.
    hosts = next((value for word, value in itertools.pairwise(words) if word == "--hosts"), "")
    hosts = hosts or next((word for word in words if word.startswith("--hosts=")), "")
    return [*words, f"--nodes={least}:{len(hosts.split(','))}"]


_VERBS = {
    "resume": "`hlat train RECIPE` resumes an interrupted run: give the same command again",
    "continue": "`hlat train RECIPE` resumes an interrupted run: give the same command again",
    "restart": "`hlat train RECIPE` resumes an interrupted run: give the same command again",
    "run": "It is `hlat train RECIPE`",
    "start": "It is `hlat train RECIPE`",
    "fit": "It is `hlat train RECIPE`",
    "pretrain": "It is `hlat train RECIPE`",
    "eval": "It is `hlat evaluate RUN`",
    "test": "It is `hlat check RECIPE`, or `hlat evaluate RUN`",
    "validate": "It is `hlat check RECIPE`, or `hlat evaluate RUN`",
    "sample": "It is `hlat generate RUN --prompt TEXT`",
    "chat": "It is `hlat generate RUN --prompt TEXT`",
    "infer": "It is `hlat generate RUN --prompt TEXT`",
    "tokenize": "It is `hlat data prepare RECIPE`",
    "preprocess": "It is `hlat data prepare RECIPE`",
    "prepare": "It is `hlat data prepare RECIPE`",
    "convert": "It is `hlat import` for other programs' models, `hlat export` for Hugging Face's",
    "list": "It is `hlat runs`",
    "ls": "It is `hlat runs`",
    "status": "It is `hlat runs`, or `hlat show RUN`",
    "new": "It is `hlat init TEXTS`",
    "create": "It is `hlat init TEXTS`",
    "help": "It is `hlat --help`, and `hlat VERB --help`",
    "version": "It is `hlat --version`",
}
_OVERRIDES = "Overrides follow the recipe, without an option: training.steps=100"
_RESUMES = "`hlat train` resumes by itself: give the same command again, without it"
_OPTIONS = {
    "resume": _RESUMES,
    "continue": _RESUMES,
    "resume-from": _RESUMES,
    "from-checkpoint": "Write the field checkpoint.init_from=CHECKPOINT",
    "set": _OVERRIDES,
    "override": _OVERRIDES,
    "overrides": _OVERRIDES,
    "config": "The recipe is an argument, without an option",
    "recipe": "The recipe is an argument, without an option",
    "checkpoint": "The run or checkpoint is an argument, without an option",
    "n": "The number of processes is --nproc N",
    "output": "Where a file or folder is written, that is --to",
    "out": "Where a file or folder is written, that is --to",
    "format": "Models are exported as Hugging Face's safetensors, and formats of text are known by their endings",
}
_PROCESS_OPTIONS = ("--nproc", "--nodes", "--world")
_FIELD = re.compile(r"[\w.]+(=\w+)?")
_DTYPES = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32"}


def hinted(error: Any) -> str:
    """Return the message of an error of typer, with what would work where that is known."""
    message = str(error.message or "")
    message = message.replace("Value error, ", "").replace("Input should be ", "must be ")
    if (option := getattr(error, "option_name", None)) and (
        hint := _option_hint(option, getattr(getattr(error, "ctx", None), "command", None))
    ):
        if getattr(error, "possibilities", None):
            # The parser's guesses by spelling are worse than a hint.
            error.possibilities = None
        return f"{message}. {hint}"
    if (option and not getattr(error, "possibilities", None)) or message.startswith("Got unexpected extra argument"):
        return message + _of_verb(error, message)
    if found := re.match(r"No such command '([^']+)'", message):
        hint = _VERBS.get(found[1], "")
        return f"No such command '{found[1]}'. {hint}." if hint and _is_top(error) else message + _verbs_below(error)
    if (refused := re.match(r"'([^']+)' is not one of ", message)) and f"'{_DTYPES.get(refused[1])}'" in message:
        return f"{message} Here it is '{_DTYPES[refused[1]]}'."
    of_missing = getattr(getattr(error, "param", None), "help", None) if not message else None
    return message or str((type(error).__name__ == "MissingParameter" and of_missing) or "")


def _is_top(error: Any) -> bool:
    # Below a verb, as in hlat launch mine.yaml, the hints for verbs do not apply.
    return getattr(getattr(error, "ctx", None), "parent", None) is None


def _verbs_below(error: Any) -> str:
    context: Any = getattr(error, "ctx", None)
    names = list(getattr(getattr(context, "command", None), "commands", {}))
    if _is_top(error) or not names:
        return ""
    return f" There are: {', '.join(names)}; as in `hlat {context.info_name} {names[0]}`, and -h shows their arguments."


def _of_verb(error: Any, message: str) -> str:
    context = getattr(error, "ctx", None)
    if getattr(error, "option_name", None):
        parameters = getattr(getattr(context, "command", None), "params", ())
        options = [names[0] for each in parameters if (names := [name for name in each.opts if name.startswith("--")])]
        return f". There are: {', '.join(options)}" if options else ""
    extra = re.search(r"argument\S* \((\S+?)[\s)]", message)
    is_plan = getattr(context, "info_name", "") == "plan"
    return f". Here a model or recipe is an option: --model {extra[1]}" if extra and is_plan else ""


def process_options(command: Any) -> list[str]:
    """List the options of a verb, or of those below it, that say how many processes there are."""
    below = [command, *getattr(command, "commands", {}).values()]
    options = {name for each in below for parameter in getattr(each, "params", ()) for name in parameter.opts}
    return [name for name in _PROCESS_OPTIONS if name in options]


def _option_hint(option: str, command: Any) -> str:
    """Name what an unknown option is here; empty if nothing is known."""
    name = option.lstrip("-").partition("=")[0]
    if "." in name:
        return f"Overrides take no dashes: {name}=VALUE"
    if name in _OPTIONS:
        return _OPTIONS[name]
    from hlat.config import field_called

    if (meant := field_called(name.replace("-", "_"))) is None:
        return ""
    if meant.startswith("--"):
        return _process_hint(meant, process_options(command))
    if not _FIELD.fullmatch(meant):  # a field that means something else, with a note
        return f"Here it is {meant}"
    written = meant if "=" in meant else f"{meant}=VALUE"
    return f"It is a field of the recipe, and its override takes no dashes: {written}"


def _process_hint(meant: str, own: list[str]) -> str:
    """Name the options of a verb for a number of processes or hosts; empty if it has none."""
    option, note = meant.split(maxsplit=1)[0], meant.partition(": ")[2]
    # A verb without --nproc may have another option for the same number, but --nodes counts hosts.
    others = [each for each in own if each != "--nodes"] if option == "--nproc" else []
    options = [option] if option in own else others
    return f"Here it is {' or '.join(options)}{': ' if note else ''}{note}" if options else ""
