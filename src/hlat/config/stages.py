"""Stages of a run: what each changes, where it lies, and the plain recipe that each is.

    sections, stages --stage_contents--> sections of each stage: those before it, and what it names
    Recipe with stages --stage_recipes--> a Recipe for each stage, without stages, at its StagePlace

A stage is a recipe like any other: the model, the data, the step and the layout are built from it, and know nothing of
stages. Borders lie in the sequence of global batches, as those of ``batch.ramp`` do: a batch that a run skips still
takes its place. So which samples a step reads stays a function of the recipe.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hlat.config.errors import Problem
from hlat.config.sections.training import StageConfig

if TYPE_CHECKING:
    from hlat.config.recipe import BatchSchedule, Recipe

_MAY_CHANGE: Mapping[str, tuple[str, ...] | None] = {
    "model": ("rope", "local_rope"),
    "data": ("path", "sources", "sequence_length", "packing", "isolate", "shuffle", "prepared_dir"),
    "batch": ("global_batch", "micro_batch"),
    "optimizer": None,
    "schedule": None,
    "training": ("ema", "log_every"),
    "evaluation": None,
    "parallel": None,
    "memory": None,
}
"""Sections that a stage may change, and their fields; None for all but those below."""
_SCALES = ("transfer", "base_hidden_size", "base_layers", "base_head_dim")
_FIXED = {"optimizer": ("kind", *_SCALES), "schedule": ("horizon_steps",)}
_WHY_FIXED = {
    "kind": "the state of one optimizer means nothing to another one.",
    "horizon_steps": "the schedule of a stage ends with the last stage that keeps it.",
    **dict.fromkeys(_SCALES, "the initial weights of the run are scaled by it."),
}


@dataclass(frozen=True)
class StagePlace:
    """Place of a stage in its run. Batches are counted from 0, over the whole run."""

    run: "Recipe"  # with all stages
    index: int
    first: int  # the stage's first batch
    stop: int  # the batch after its last
    batches: "BatchSchedule"  # of the whole run
    total: int  # optimizer steps of the whole run
    schedule_first: int  # batch with which the stage begins that gives the schedule
    schedule_stop: int  # batch after the last stage that keeps it
    from_current: bool = False  # the schedule starts from the rate that holds at its beginning, not from optimizer.lr
    start: float = 0.0  # rate before the schedule's first step; ``hlat.optim.placed`` computes it

    @property
    def stage(self) -> StageConfig:
        return self.run.stages[self.index]

    @property
    def is_last(self) -> bool:
        return self.index == len(self.run.stages) - 1

    @property
    def steps(self) -> int:
        return self.stop - self.first

    @property
    def schedule_steps(self) -> int:
        """Steps from the beginning of the schedule to the end of the last stage that keeps it."""
        return self.schedule_stop - self.schedule_first

    @property
    def tokens(self) -> int:
        """Tokens of the stage."""
        return self.batches.tokens_before(self.stop) - self.batches.tokens_before(self.first)


def merged(values: Any, changes: Mapping[str, Any], depth: int = 1) -> dict[str, Any]:
    """Return a section with changed fields; a field that is a section itself, such as model.rope, keeps its others."""
    found = dict(values) if isinstance(values, Mapping) else {}
    for name, value in changes.items():
        inner = depth > 0 and isinstance(value, Mapping) and isinstance(found.get(name), Mapping)
        found[name] = merged(found[name], value, depth - 1) if inner else value
    return found


def stage_contents(content: Mapping[str, Any], stages: Sequence[StageConfig]) -> Iterator[dict[str, Any]]:
    """Yield the sections of a recipe as they are in each stage."""
    folders: dict[str, tuple[Any, Any]] = {}
    now = {name: value for name, value in content.items() if name != "stages"}
    for number, stage in enumerate(stages):
        for section in _MAY_CHANGE:
            if changes := getattr(stage, section):
                now[section] = merged(now.get(section), changes)
        if number and stage.schedule:
            # A new one: it ends with its stage, and warms up only if that is said again.
            now["schedule"] |= {"horizon_steps": None, "warmup_steps": stage.schedule.get("warmup_steps", 0)}
        if number and "batch" in now:
            now["batch"] = {name: value for name, value in now["batch"].items() if name != "ramp"}
        data = dict(now.get("data") or {})
        if "sources" in stage.data and "path" not in stage.data:
            data["path"] = None
        elif "path" in stage.data and "sources" not in stage.data:
            data["sources"] = ()
        if stage.weights and isinstance(data.get("sources"), list | tuple):
            data["sources"] = [_weighted(source, stage.weights) for source in data["sources"]]
        _give_folder(now | {"data": data}, stage, folders, data)
        now["data"] = data
        yield {**now, "training": dict(now.get("training") or {})}


def _weighted(source: Any, weights: Mapping[str, float]) -> Any:
    if not isinstance(source, Mapping):
        return source
    return {**source, "weight": weights.get(str(source.get("name") or source.get("path")), 0.0)}


def _give_folder(
    content: Mapping[str, Any], stage: StageConfig, folders: dict[str, tuple[Any, Any]], data: dict[str, Any]
) -> None:
    """Set the folder of prepared data: that of an earlier stage with the same text, or else one of its own.

    There is one vocabulary for the whole run: that of the first stage. ``folders`` has folder and tokenizer by text.
    """
    names = ("path", "text_column", "tokens_column", "name")
    sources = data.get("sources") or ({"path": data.get("path")},)
    key = repr([[source.get(name) for name in names] for source in sources if isinstance(source, Mapping)])
    if not folders:
        folders[key] = data.get("prepared_dir"), data.get("tokenizer")
        return
    if key not in folders:
        folder, tokenizer = next(iter(folders.values()))
        run: Any = content.get("run") or {}
        own = f"{run.get('dir') or 'runs/' + str(run.get('name', 'run'))}/data"
        if not (isinstance(tokenizer, Mapping) and tokenizer.get("path")):
            tokenizer = {**(tokenizer or {}), "path": f"{folder or own}/tokenizer"}
        folders[key] = f"{own}-{stage.name}", tokenizer
    if "prepared_dir" in stage.data:
        folders[key] = stage.data["prepared_dir"], folders[key][1]
    data["prepared_dir"], data["tokenizer"] = folders[key]
    if data["tokenizer"] is None:
        del data["tokenizer"]


def stage_recipes(run: "Recipe") -> list["Recipe"]:
    """Return the recipe of each stage of a run, at its place; RecipeError or ValidationError if one is none."""
    kind = type(run)
    # What the recipe leaves open stays open in each stage.
    plain = [
        kind.model_validate({**content, "training": {**content["training"], "steps": 1, "tokens": None}})
        for content in stage_contents(run.model_dump(exclude_unset=True), run.stages)
    ]
    plain = [
        recipe.having({path: value for path, value in values.items() if not recipe.gives(path)}, given=False)
        for recipe, values in zip(plain, run.stage_defaults, strict=True)
    ]
    counts = [_count(stage, recipe) for stage, recipe in zip(run.stages, plain, strict=True)]
    starts = [sum(counts[:number]) for number in range(len(counts) + 1)]
    batches, total = _joined(plain, counts), starts[-1]
    found = []
    for number, recipe in enumerate(plain):
        given = max((i for i in range(number + 1) if run.stages[i].schedule), default=0)
        kept = next((i for i in range(number + 1, len(plain)) if run.stages[i].schedule), len(plain))
        names_rate = any("lr" in run.stages[i].optimizer for i in range(given, number + 1))
        place = StagePlace(
            run,
            number,
            starts[number],
            starts[number + 1],
            batches,
            total,
            starts[given],
            starts[kept],
            from_current=given > 0 and not names_rate,
        )
        found.append(recipe.having({"training.steps": total}).placed(place))
    return found


def _count(stage: StageConfig, recipe: "Recipe") -> int:
    if stage.steps is not None:
        return stage.steps
    return recipe.batches.count(-(-(stage.tokens or 1) // recipe.data.sequence_length))


def _joined(recipes: Sequence["Recipe"], counts: Sequence[int]) -> "BatchSchedule":
    """Return the batches of a run: those of its stages, one after the other."""
    parts, lengths = [], []
    for recipe, count in zip(recipes, counts, strict=True):
        found = recipe.batches.in_steps(count)
        parts += found
        lengths += [recipe.data.sequence_length] * len(found)
    last = recipes[-1].batches
    return type(last)(parts[-1][1], tuple(parts[:-1]), tuple(lengths))


def open_defaults(recipe: "Recipe") -> dict[str, Any]:
    """Return the values, by dotted path, of what a stage leaves open, where they are not those of its section."""
    return {
        f"{section}.{name}": value
        for section in _MAY_CHANGE
        for name, value in getattr(recipe, section)
        if not recipe.gives(f"{section}.{name}")
        and value != type(getattr(recipe, section)).model_fields[name].get_default(call_default_factory=True)
    }


def changeable(path: str) -> bool:
    """Return True if a stage may change the field of a path."""
    section, _, rest = path.partition(".")
    names, name = _MAY_CHANGE.get(section, ()), rest.partition(".")[0]
    return (names is None or name in names) and name not in _FIXED.get(section, ())


def in_stage(problem: Problem, number: int, stages: Sequence[StageConfig]) -> Problem:
    """Name the stage that gives the field of a problem; the path stays if none up to ``number`` does."""
    section, _, rest = problem.path.partition(".")
    name = rest.partition(".")[0]
    given = [i for i in range(number + 1) if name in (getattr(stages[i], section, None) or ())]
    return replace(problem, path=f"stages.{given[-1]}.{problem.path}") if given else problem


def stage_problems(content: Mapping[str, Any], stages: Sequence[StageConfig]) -> Iterator[Problem]:
    """Yield what is wrong with stages by themselves: names, lengths, and fields that no stage may change."""
    training = content.get("training")
    for name in ("steps", "tokens"):
        if isinstance(training, Mapping) and training.get(name) is not None:
            reason = "each stage gives its own length."
            yield Problem(f"training.{name}", reason, "Move it into the stages.", training[name], True)
    data = content.get("data")
    for name, value in (data if isinstance(data, Mapping) else {}).items():
        if name == "phases" and value:
            yield Problem("data.phases", "stages have weights of their own.", "Give each stage its weights.")
        if name == "mode" and value == "online":
            reason = "a source's place in the text is known of prepared data only."
            yield Problem("data.mode", reason, "Use data.mode=prepared.", value, True)
    run = content.get("run")
    if isinstance(run, Mapping) and run.get("ladder") is not None:
        reason = "a ladder's law holds for one text and one schedule, and stages change them."
        yield Problem("run.ladder", reason, "Remove it, or the stages.", run["ladder"], True)
    seen: set[str] = set()
    for number, stage in enumerate(stages):
        here = f"stages.{number}"
        if stage.name in seen:
            yield Problem(f"{here}.name", "an earlier stage is called so too.", "Use another one.", stage.name, True)
        seen.add(stage.name)
        if (stage.steps is None) == (stage.tokens is None):
            yield Problem(here, f"stage {stage.name} has to give its length.", "Give one of steps and tokens.")
        yield from _field_problems(here, stage)
        if number == 0 and (stage.restart or stage.fresh):
            name = "restart" if stage.restart else "fresh"
            yield Problem(f"{here}.{name}", "nothing comes before the first stage.", "Remove it.")


def _field_problems(here: str, stage: StageConfig) -> Iterator[Problem]:
    for section, names in _MAY_CHANGE.items():
        fixed = _FIXED.get(section, ())
        for name in getattr(stage, section):
            if name in fixed:
                yield Problem(f"{here}.{section}.{name}", _WHY_FIXED[name], "Remove it.")
            elif names is not None and name not in names:
                remedy = f"Of {section}, these may: {', '.join(names)}."
                yield Problem(f"{here}.{section}.{name}", "cannot change in the course of a run.", remedy)


def _ends_at_zero(recipe: "Recipe") -> bool:
    # Of a schedule of the user's own this is not known.
    decays = recipe.schedule.kind in ("cosine", "cosine-clipped", "wsd", "linear", "1-sqrt")
    place, horizon = recipe.place, recipe.schedule.horizon_steps
    is_over = place is not None and (horizon is None or horizon <= place.schedule_steps)
    return decays and is_over and recipe.schedule.min_ratio == 0


def _ratio_problems(before: "Recipe", recipe: "Recipe") -> Iterator[Problem]:
    """Yield a change of the ratio of an optimizer's two rates: where one goes on, the other would jump."""
    place = recipe.place
    assert place is not None, "the recipe of a stage"
    was, now = (each.rate_factor(False) / each.rate_factor(True) for each in (before.optimizer, recipe.optimizer))
    if math.isclose(was, now):
        return
    reason = (
        f"here the rate of embeddings, norms and biases is {now:.4g} times that of matrices, and {was:.4g} times in "
        f"stage {place.run.stages[place.index - 1].name}: it would jump, while the schedule goes on from the rate that "
        "holds."
    )
    given = [name for name in ("adamw_lr", "lr") if name in place.stage.optimizer]
    remedy = "Change optimizer.lr and optimizer.adamw_lr by the same factor."
    yield Problem(".".join([f"stages.{place.index}.optimizer", *given[:1]]), reason, remedy)


def span_problems(recipes: Sequence["Recipe"]) -> Iterator[Problem]:
    """Yield what is wrong with the lengths of schedules, and of training samples that restart."""
    for recipe in recipes:
        place = recipe.place
        assert place is not None, "the recipe of a stage"
        span, warmup = place.schedule_steps, recipe.schedule.warmup_steps
        is_given = place.schedule_first == place.first
        if is_given and warmup >= (recipe.schedule.horizon_steps or span):
            path = f"stages.{place.index}.schedule.warmup_steps" if place.index else "schedule.warmup_steps"
            yield Problem(path, f"the schedule has {span} steps.", f"Use at most {span - 1}.", warmup, True)
        if is_given and place.from_current and _ends_at_zero(recipes[place.index - 1]):
            reason = f"it goes on from the rate of stage {place.run.stages[place.index - 1].name}, which ends with 0."
            remedy = "Give the stage an optimizer.lr, or the schedule before it a min_ratio above 0."
            yield Problem(f"stages.{place.index}.schedule", reason, remedy)
        if place.index and (place.from_current or (is_given and warmup)):
            yield from _ratio_problems(recipes[place.index - 1], recipe)
        names = place.stage.restart if isinstance(place.stage.restart, tuple) else ()
        labels = [source.label for source in recipe.data.sources]
        for name in names:
            if name not in labels:
                known = f"The sources are called {', '.join(labels)}." if labels else "Use restart: true."
                yield Problem(f"stages.{place.index}.restart", f"there is no source {name}.", known)
        if 0 < len(set(names) & set(labels)) < len(labels) and all(each.weight is None for each in recipe.data.sources):
            reason = "sources without weights are read in one order, and begin anew together."
            yield Problem(f"stages.{place.index}.restart", reason, "Use restart: true, or give the sources weights.")
        for name in place.stage.weights:
            if name not in labels:
                known = f"The sources are called {', '.join(labels)}." if labels else "Name them in data.sources."
                yield Problem(f"stages.{place.index}.weights", f"there is no source {name}.", known)
