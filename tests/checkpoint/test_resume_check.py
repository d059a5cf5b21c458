"""Fields of the recipe that may change when a run resumes, and fields that may not."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from hlat.checkpoint import RecipeChange, check_fork, check_resume, saved_precision_mode, software_versions
from hlat.config import Recipe
from hlat.precision import MODES
from hlat.runtime.errors import CheckpointError

BASE: dict[str, Any] = {
    "model": {"vocab_size": 64, "layers": 2, "hidden_size": 32, "intermediate_size": 64, "heads": 4},
    "data": {"path": "corpus.txt"},
    "training": {"steps": 10},
}


def recipe(**changes: Any) -> Recipe:
    """The base recipe with some fields replaced; '__' in a name separates the sections."""
    tree = {section: dict(values) for section, values in BASE.items()}
    for path, value in changes.items():
        *parents, last = path.split("__")
        section: Any = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return Recipe.model_validate(tree)


def saved(**changes: Any) -> dict[str, Any]:
    return recipe(**changes).model_dump(mode="json")


def test_the_same_recipe_has_no_changes() -> None:
    assert check_resume(saved(), "f", recipe(), "f", 5) == []


@pytest.mark.parametrize("invalid", [None, True, 7, "text", [], [1, "x"], {"a": 1}, [{"a": 1}], [[]]], ids=repr)
@pytest.mark.parametrize(
    "path", ["model", "data", "data.sources", "data.phases", "faults", "model.rope", "model.heads"]
)
def test_a_saved_recipe_with_invalid_values_is_compared_or_refused(path: str, invalid: Any) -> None:
    """Whatever an edited file contains, the result is a change or none, never an internal error."""
    tree = saved()
    *parents, last = path.split(".")
    section = tree
    for parent in parents:
        section = section[parent]
    section[last] = invalid
    now = (
        recipe(faults=[])
        if path != "faults"
        else Recipe.model_validate(BASE | {"faults": [{"kind": "hang", "at_step": 3}]})
    )
    try:
        check_resume(tree, "f", now, "f", 5)
    except CheckpointError as error:
        assert "the run cannot resume with this recipe" in str(error)


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("model__vocab_size", 64, 128),
        ("model__layers", 2, 3),
        ("model__tie_embeddings", False, True),
        ("model__norm_eps", 1e-5, 1e-6),
        ("model__init_std", 0.02, 0.01),
        ("model__kv_heads", 4, 2),
        ("model__rope__theta", 10000.0, 500000.0),
        ("data__sequence_length", 1024, 512),
        ("data__shuffle", True, False),
        ("batch__global_batch", 32, 64),
        ("training__seed", 0, 1),
    ],
)
def test_a_change_of_a_fixed_field_is_refused(path: str, old: Any, new: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_resume(saved(**{path: old}), "f", recipe(**{path: new}), "f", 5)
    message = str(caught.value)
    assert f"{path.replace('__', '.')}: saved with {old!r}, now {new!r}" in message
    assert "Set the saved values again" in message and "run.dir" in message


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("model__coalesce", True, False),
        ("model__preset", None, "tiny-1m"),
        ("batch__micro_batch", 8, 4),
        ("checkpoint__keep_last", 3, 5),
        ("checkpoint__every_steps", 500, None),
        ("data__path", "corpus.txt", "moved.txt"),
        ("run__dir", None, "/elsewhere"),
        ("evaluation__sequences", 256, None),
    ],
)
def test_other_fields_may_change_and_are_listed(path: str, old: Any, new: Any) -> None:
    changes = check_resume(saved(**{path: old}), "f", recipe(**{path: new}), "f", 5)
    assert changes == [RecipeChange(path.replace("__", "."), old, new)]


def after(old: dict[str, Any], new: dict[str, Any], step: int) -> list[RecipeChange]:
    return check_resume(saved(**old), "f", recipe(**new), "f", step)


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("optimizer__lr", 3e-4, 1e-4),
        ("optimizer__betas", [0.9, 0.95], [0.9, 0.99]),
        ("optimizer__clip_norm", 1.0, None),
        ("schedule__min_ratio", 0.1, 0.0),
        ("training__steps", 10, 20),
        ("training__loss_terms", {}, {"mine:term": {}}),
    ],
)
def test_what_updated_the_weights_is_changed_in_a_fork(path: str, old: Any, new: Any, tmp_path: Path) -> None:
    """The message has the command, with a folder that is free."""
    run = str(tmp_path / "trunk")
    (tmp_path / "trunk-fork").mkdir()
    with pytest.raises(CheckpointError) as caught:
        after({path: old}, {path: new, "run__dir": run, "evaluation__sequences": 8}, 5)
    *_, before, command = str(caught.value).splitlines()
    assert before.startswith("The steps done so far had other values.")
    override = f"{path.replace('__', '.')}={json.dumps(new)}"
    assert shlex.split(command) == ["hlat", "fork", f"{run}@5", "--to", f"{run}-fork2", override]
    assert RecipeChange(path.replace("__", "."), old, new) in check_fork(saved(**{path: old}), recipe(**{path: new}))


@pytest.mark.parametrize(
    ("old", "new", "last"),
    [
        # the last step after which the change is accepted: up to there both schedules have the same rates
        ({"schedule__kind": "wsd"}, {"schedule__kind": "wsd", "training__steps": 20}, 8),
        ({"schedule__kind": "wsd"}, {"schedule__kind": "wsd", "schedule__decay_fraction": 0.5}, 5),
        ({"schedule__kind": "wsd"}, {"schedule__kind": "constant"}, 8),
        ({"schedule__kind": "constant"}, {"schedule__kind": "constant", "training__steps": 20}, 10),
        ({"schedule__warmup_steps": 4}, {"schedule__warmup_steps": 4, "training__steps": 20}, 4),
        ({}, {"training__steps": 20, "schedule__horizon_steps": 10}, 10),
        ({}, {"training__steps": None, "training__tokens": 10 * 32 * 1024}, 10),
    ],
)
def test_a_schedule_may_change_as_long_as_no_past_rate_does(
    old: dict[str, Any], new: dict[str, Any], last: int
) -> None:
    for step in range(1, 11):
        if step <= last:
            assert {change.path.partition(".")[0] for change in after(old, new, step)} <= {"schedule", "training"}
            continue
        with pytest.raises(CheckpointError, match="hlat fork"):
            after(old, new, step)


@pytest.mark.parametrize("old", MODES)
@pytest.mark.parametrize("new", MODES)
def test_another_precision_mode_is_refused_in_every_direction(old: str, new: str) -> None:
    before, now = saved(precision__mode=old), recipe(precision__mode=new)
    if old == new:
        assert check_resume(before, "f", now, "f", 5) == []
        return
    with pytest.raises(CheckpointError) as caught:
        check_resume(before, "f", now, "f", 5)
    message = str(caught.value)
    assert f"precision.mode: saved with {old!r}, now {new!r}" in message
    assert "checkpoint.init_from" in message


def test_a_recipe_without_precision_mode_means_fp32() -> None:
    for missing in ({}, {"precision": {}}):
        before = {name: value for name, value in saved().items() if name != "precision"} | missing
        assert saved_precision_mode(before) == "fp32"
        assert check_resume(before, "f", recipe(precision__mode="fp32"), "f", 5) == []
        with pytest.raises(CheckpointError, match="saved with 'fp32', now 'mixed'"):
            check_resume(before, "f", recipe(precision__mode="mixed"), "f", 5)


def test_all_refused_changes_are_listed() -> None:
    now = recipe(model__layers=3, training__seed=5, batch__global_batch=16, optimizer__lr=1.0)
    with pytest.raises(CheckpointError) as caught:
        check_resume(saved(), "old-fingerprint", now, "new-fingerprint", 5)
    message = str(caught.value)
    for part in ("model.layers", "training.seed", "batch.global_batch", "old-fingerprint", "new-fingerprint"):
        assert part in message
    assert "optimizer.lr" in message and "Set the saved values again, or use another run.dir" in message


@pytest.mark.parametrize(
    ("options", "name"),
    [({"model__qkv_bias": True}, "qwen2"), ({"model__qk_norm": True}, "qwen3"), ({}, "mistral")],
)
def test_another_name_of_the_same_architecture_is_no_change(options: dict[str, Any], name: str) -> None:
    """Recipes older than the field have no name; a model that was imported from Qwen's files now has one."""
    before = saved(**options)
    assert check_resume(before, "f", recipe(**options, model__architecture=name), "f", 5) == []
    del before["model"]["architecture"], before["model"]["sliding_window"]
    assert check_resume(before, "f", recipe(**options, model__architecture=name), "f", 5) == []


def test_another_architecture_or_window_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"model\.architecture: saved with 'llama', now 'olmo2'"):
        check_resume(saved(), "f", recipe(model__architecture="olmo2"), "f", 5)
    now = recipe(model__architecture="mistral", model__sliding_window=8)
    with pytest.raises(CheckpointError, match=r"model\.sliding_window: saved with None, now 8"):
        check_resume(saved(), "f", now, "f", 5)


def test_other_data_is_refused_whatever_its_path() -> None:
    with pytest.raises(CheckpointError, match="content of the prepared tokens"):
        check_resume(saved(), "a", recipe(), "b", 5)
    assert check_resume(saved(), "a", recipe(data__path="moved.txt"), "a", 5)[0].path == "data.path"


_RAMP = [{"tokens": 1000, "global_batch": 8}, {"tokens": 2000, "global_batch": 16}]


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ([], _RAMP, "batch.ramp: saved with []"),
        (_RAMP, [], "batch.ramp: saved with [{"),
        (_RAMP, _RAMP[:1], "batch.ramp: saved with [{"),
        (_RAMP, [_RAMP[0], _RAMP[1] | {"tokens": 2001}], "batch.ramp.1.tokens: saved with 2000, now 2001"),
        (_RAMP, [_RAMP[0] | {"global_batch": 4}, _RAMP[1]], "batch.ramp.0.global_batch: saved with 8, now 4"),
    ],
)
def test_a_batch_ramp_is_part_of_the_order_of_the_data(old: Any, new: Any, named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_resume(saved(batch__ramp=old), "f", recipe(batch__ramp=new), "f", 5)
    assert named in str(caught.value)
    assert check_resume(saved(batch__ramp=old), "f", recipe(batch__ramp=old), "f", 5) == []


def test_a_checkpoint_older_than_batch_ramps_resumes_without_one() -> None:
    before = saved()
    del before["batch"]["ramp"]
    assert check_resume(before, "f", recipe(), "f", 5) == []
    with pytest.raises(CheckpointError, match=r"batch\.ramp"):
        check_resume(before, "f", recipe(batch__ramp=_RAMP), "f", 5)


LLAMA3 = {"kind": "llama3", "factor": 8.0}


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (None, LLAMA3, "model.rope.scaling"),
        (LLAMA3, None, "model.rope.scaling"),
        (LLAMA3, LLAMA3 | {"factor": 4.0}, "model.rope.scaling.factor"),
        (LLAMA3, {"kind": "linear", "factor": 8.0}, "model.rope.scaling.kind"),
    ],
)
def test_rope_scaling_is_part_of_the_model(old: Any, new: Any, named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_resume(saved(model__rope={"scaling": old}), "f", recipe(model__rope={"scaling": new}), "f", 5)
    assert f"{named}: " in str(caught.value)


_TWO = [{"path": "a", "name": "a", "weight": 1.0}, {"path": "b", "name": "b", "weight": 2.0}]


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ({"data__sources": _TWO}, {"data__sources": [_TWO[0], _TWO[1] | {"weight": 3.0}]}, "data.sources.1.weight"),
        ({"data__sources": _TWO}, {"data__sources": _TWO[:1]}, "data.sources"),
        (
            {"data__phases": [{"weights": {"a": 1.0}}]},
            {"data__phases": [{"until_tokens": 9.0, "weights": {"a": 1.0}}, {"weights": {"b": 1.0}}]},
            "data.phases",
        ),
        (
            {"data__phases": [{"until_tokens": 8.0, "weights": {"a": 1.0}}, {"weights": {"b": 1.0}}]},
            {"data__phases": [{"until_tokens": 9.0, "weights": {"a": 1.0}}, {"weights": {"b": 1.0}}]},
            "data.phases.0.until_tokens",
        ),
    ],
)
def test_the_mixture_is_part_of_the_run(old: dict[str, Any], new: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_resume(saved(**old), "f", recipe(**new), "f", 5)
    assert f"{named}: saved with " in str(caught.value)


def test_the_paths_of_sources_may_change() -> None:
    moved = [source | {"path": f"elsewhere/{source['path']}"} for source in _TWO]
    changes = check_resume(saved(data__sources=_TWO), "f", recipe(data__sources=moved), "f", 5)
    assert [change.path for change in changes] == ["data.sources.0.path", "data.sources.1.path"]
    plain = [{"path": "a"}]
    assert check_resume(saved(data__sources=plain), "f", recipe(data__sources=[*plain, *plain]), "f", 5)


def test_writing_out_a_default_is_no_change() -> None:
    assert check_resume(saved(), "f", recipe(model__kv_heads=4, model__head_dim=8), "f", 5) == []
    assert check_resume(saved(model__kv_heads=4, model__head_dim=8), "f", recipe(), "f", 5) == []
    with pytest.raises(CheckpointError, match="head_dim: saved with None, now 16"):
        check_resume(saved(), "f", recipe(model__head_dim=16), "f", 5)


def test_a_field_newer_than_the_checkpoint_had_its_default() -> None:
    old = saved()
    del old["model"]["qk_norm"], old["checkpoint"], old["optimizer"]["eps"]
    assert check_resume(old, "f", recipe(), "f", 5) == []
    assert check_fork(old, recipe(optimizer__eps=1e-5)) == [RecipeChange("optimizer.eps", 1e-8, 1e-5)]
    with pytest.raises(CheckpointError, match="qk_norm: saved with False, now True"):
        check_resume(old, "f", recipe(model__qk_norm=True), "f", 5)


def test_a_removed_field_is_listed() -> None:
    old = saved() | {"extra": {"a": 1}}
    old["optimizer"]["amsgrad"] = True
    assert check_resume(old, "f", recipe(), "f", 5) == [
        RecipeChange("optimizer.amsgrad", True, None),
        RecipeChange("extra", {"a": 1}, None),
    ]


def test_every_fixed_field_is_checked() -> None:
    """Each field marked as fixed, in any section, is refused if its saved value differs."""
    now = recipe()
    marked = list(fixed_fields(now))
    assert len(marked) > 15
    for path in marked:
        old = saved()
        section: Any = old
        for part in path[:-1]:
            section = section[part]
        section[path[-1]] = "something else"
        with pytest.raises(CheckpointError) as caught:
            check_resume(old, "f", now, "f", 5)
        assert f"{'.'.join(path)}: saved with 'something else'" in str(caught.value)


def fixed_fields(section: BaseModel, *above: str) -> Any:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if field.json_schema_extra == {"resume": "fixed"}:
            yield (*above, name)
        elif isinstance(value, BaseModel):
            yield from fixed_fields(value, *above, name)


def test_software_versions_are_complete() -> None:
    assert set(software_versions()) == {"hlat", "torch", "python"}
    assert all(software_versions().values())
