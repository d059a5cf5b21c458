"""A recipe from the YAML configuration of NxDT (NeuronX Distributed Training).

YAML --interpolations resolved--> settings --RULES, one for each--> fields of a recipe, notes
--overrides, checks--> text of a recipe file with the notes as comments, and what is still missing
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hlat.config.errors import Problem, RecipeError
from hlat.config.explanations import suggestion
from hlat.config.files.yaml_loader import apply_overrides, merge, read_file
from hlat.config.load import parse_recipe
from hlat.config.nxdt.interpolation import resolve
from hlat.config.nxdt.table import ABSENT, RULES
from hlat.config.nxdt.translation import Note, Translation
from hlat.config.presets import PRESETS
from hlat.runtime.terminal_text import escape_controls

_SECTIONS = {name.partition(".")[0] for name in RULES}
_WIDTH = 116  # of comment lines


@dataclass(frozen=True)
class TranslatedRecipe:
    """A recipe that was made from an NxDT configuration.

    Attributes:
        content: the sections of the recipe.
        differs: settings that were translated to something that is not quite the same.
        lost: settings without counterpart.
        unneeded: settings that hlat needs no counterpart of.
        missing: problems of the recipe as it is: what the user has to add or change before it can run.
        world: processes that the configuration ran on; None if it does not say.
    """

    content: dict[str, Any]
    differs: tuple[Note, ...]
    lost: tuple[Note, ...]
    unneeded: tuple[Note, ...]
    missing: tuple[Problem, ...]
    world: int | None

    def text(self, source: str) -> str:
        """Return the text of a recipe file; ``source`` is the name of the NxDT file."""
        lines = [f"Translated from {Path(source).name}, a configuration of NxDT.", *self._remarks()]
        comments = "".join(f"# {escape_controls(line)}\n" if line else "#\n" for line in lines)
        return comments + "\n" + yaml.safe_dump(self.content, sort_keys=False, allow_unicode=True, width=_WIDTH)

    def _remarks(self) -> Iterator[str]:
        lists = {
            "Not quite the same": self.differs,
            "Without counterpart": self.lost,
            "To be added or changed before it runs": self.missing,
        }
        for head, entries in lists.items():
            if entries:
                yield from ("", f"{head}:", *(f"  {entry}" for entry in entries))


def recipe_from_nxdt(path: str | Path, overrides: Sequence[str] = (), model: str | None = None) -> TranslatedRecipe:
    """Translate an NxDT configuration.

    Args:
        path: the YAML file.
        overrides: ``a.b=c`` each, applied to the recipe.
        model: preset or config.json to take the model from, instead of the file's ``model.model_config``.

    Raises:
        RecipeError: the file is not an NxDT configuration, or describes a run that hlat cannot do; lists everything.
    """
    settings = dict(_settings(resolve(read_file(Path(path))), ""))
    if not {key.partition(".")[0] for key in settings} & (_SECTIONS - {"name", "data", "model", "precision"}):
        remedy = "NxDT's have trainer, exp_manager and distributed_strategy."
        raise RecipeError([Problem(str(path), "is no configuration of NxDT.", remedy)])
    translation = Translation(settings)
    for key, value in settings.items():
        _apply(translation, key, value)
    for key, rule in ABSENT.items():
        if key not in settings:
            rule(translation, key, None)
    if translation.refused:
        raise RecipeError(translation.refused, str(path))
    if model is not None:
        translation.fields.pop("model.hf_config", None)
        translation.fields["model.preset" if model in PRESETS else "model.hf_config"] = model
    content, problems = apply_overrides(_nested(translation.fields), overrides)
    return TranslatedRecipe(
        content,
        tuple(translation.differs),
        tuple(translation.lost),
        tuple(translation.unneeded),
        (*problems, *_missing(content)),
        _world(settings),
    )


def _settings(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield settings by dotted key; a mapping is a setting of its own if a rule is for the whole of it."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        if key in RULES or (f"{key}.*" in RULES and not _has_rules_below(key)) or not isinstance(value, Mapping):
            yield key, value
        else:
            yield from _settings(value, f"{key}.")


def _has_rules_below(key: str) -> bool:
    return any(name.startswith(f"{key}.") and name != f"{key}.*" for name in RULES)


def _apply(translation: Translation, key: str, value: Any) -> None:
    section = key.rpartition(".")[0]
    rule = RULES.get(key) or RULES.get(f"{key}.*") or RULES.get(f"{section}.*")
    if rule is None:
        hint = suggestion(key, RULES)
        translation.lose(key, f"not a setting that NxDT is known to read; it ignores others silently. {hint}".rstrip())
        return
    rule(translation, key, value)


def _nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for path, value in fields.items():
        branch = value
        for name in reversed(path.split(".")):
            branch = {name: branch}
        content = merge(content, branch)
    return content


def _missing(content: dict[str, Any]) -> Sequence[Problem]:
    try:
        parse_recipe(content)
    except RecipeError as error:
        return error.problems
    return ()


def _world(settings: Mapping[str, Any]) -> int | None:
    devices, nodes = settings.get("trainer.devices"), settings.get("trainer.num_nodes", 1)
    return devices * nodes if isinstance(devices, int) and isinstance(nodes, int) else None
