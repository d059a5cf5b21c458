"""Own parts in a run of one process, their formulas, and what is said of wrong ones."""

import functools
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

import hlat
from hlat.config import ModelConfig, Recipe, RecipeError, parse_recipe
from hlat.model import CrossEntropy, DecoderBlock, loss_terms
from hlat.model.architectures import architecture_of
from hlat.model.spec import FULL_MODEL
from hlat.runtime.errors import LaunchError
from hlat.tracking import StepLine
from hlat.training import check_own_parts, run
from hlat.training.components import TrainingComponent
from tests.support.same_runs import events_of, metrics_of


def test_a_run_has_an_own_part_at_every_seam(installed: Path, content: dict[str, Any]) -> None:
    recipe = parse_recipe(content)
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    outcome = run(recipe, stream=io.StringIO())
    rows = metrics_of(recipe.run_dir)
    # 1e-3 at the peak, and then 1e-3 * sqrt(5 / step)
    assert [row["lr"] for row in rows] == pytest.approx(
        [0.5e-3, *(1e-3 * min(1.0, (5 / step) ** 0.5) for step in range(2, 9))]
    )
    assert rows[-1]["task/colours/acc"] in (0.0, 0.5, 1.0)
    lines = (recipe.run_dir / "lines.txt").read_text().splitlines()
    assert lines[0] == "run own" and float(lines[-1].split()[1]) == rows[-1]["loss"] < rows[0]["loss"]
    tensors = hlat.load_model(outcome.checkpoint).state_dict()
    assert any(name.endswith("feed_forward_norm.weight") for name in tensors)


def test_label_smoothing_as_a_term_has_the_gradients_of_torch(installed: Path) -> None:
    logits = torch.randn(12, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(12) % 30
    labels[3] = -100
    theirs = logits.clone().requires_grad_()
    F.cross_entropy(theirs, labels, reduction="sum", label_smoothing=0.1).backward()
    loss = CrossEntropy()
    loss.terms = loss_terms({"label-smoothing": {"epsilon": 0.1}})
    values, gradient = loss(logits.clone(), labels, gradient=True)
    torch.testing.assert_close(gradient, theirs.grad)
    plain = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(values, plain)  # the value remains the cross-entropy


def z_term(log_z, label, mean, *, factor=1e-3):
    return factor * log_z**2


def test_a_z_loss_as_a_term_is_that_of_the_optimizer_section() -> None:
    logits = torch.randn(9, 17, generator=torch.Generator().manual_seed(0)) * 3
    one, other = CrossEntropy(), CrossEntropy()
    one.z_loss, other.terms = 1e-3, [z_term]
    labels = torch.arange(9)
    torch.testing.assert_close(one(logits.clone(), labels, True)[1], other(logits.clone(), labels, True)[1])


def test_the_halves_of_a_parallel_block_have_the_same_input(installed: Path) -> None:
    sizes = {"vocab_size": 64, "layers": 1, "hidden_size": 16, "intermediate_size": 24, "heads": 2}
    config = ModelConfig.model_validate(
        {**sizes, "max_sequence_length": 8, "architecture": "parallel-block", "residual_scale": 0.5}
    )
    torch.manual_seed(0)
    block: DecoderBlock = architecture_of(config).block()(config, FULL_MODEL)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 8, 16)
    tables = tuple(torch.ones(8, 8) * value for value in (1.0, 0.0))
    block.attention.forward = lambda x, *_: x * 3.0  # witness: no attention of hlat in it

    def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).rsqrt() * weight

    fed = block.feed_forward(rms(x, block.feed_forward_norm.weight))
    expected = x + 0.5 * 3.0 * rms(x, block.attention_norm.weight) + 0.5 * fed
    torch.testing.assert_close(block(x, tables), expected)


def test_all_problems_of_all_parts_are_said_at_once(installed: Path, content: dict[str, Any]) -> None:
    content["model"] |= {"residual_scal": 2}
    content["optimizer"] |= {"kind": "lion", "momentum": 0.9}
    content["schedule"] |= {"kind": "hlat_extras.schedules:inverse_root"}
    content["training"]["loss_terms"] = {"smoothing": {}, "hlat_extras.losses:label_smoothing": {"epsilon": "much"}}
    content["training"]["components"] = {"hlat_extras.components:Largest": {"every": 2}, "hlat_extra.x:Y": {}}
    content["evaluation"]["tasks"] = ["hlat_extras.tasks:shapes"]
    content["tracking"]["trackers"] = {"hlat_extras.losses:label_smoothing": {}}
    with pytest.raises(RecipeError) as refusal:
        check_own_parts(parse_recipe(content), 1)
    said = [str(problem) for problem in refusal.value.problems]
    expected = [
        ("model.residual_scal = 2: ", "Did you mean residual_scale?"),
        ("optimizer.momentum = 0.9: ", "Options: lr, decay_norms, clip_norm, z_loss, betas, weight_decay."),
        ("schedule.kind = 'hlat_extras.schedules:inverse_root': ", "has no inverse_root. Did you mean inverse_sqrt?"),
        ("training.loss_terms.smoothing: no installed package", "Did you mean label-smoothing?"),
        ("training.loss_terms.hlat_extras.losses:label_smoothing.epsilon = 'much': ", "valid number"),
        ("training.components.hlat_extras.components:Largest.every = 2: ", "Options: none."),
        ("training.components.hlat_extra.x:Y: there is no module hlat_extra.", "Modules are found if they are"),
        ("evaluation.tasks = 'hlat_extras.tasks:shapes': ", "There is colours."),
        ("tracking.trackers.hlat_extras.losses:label_smoothing: ", "not a class with the methods open, log and close"),
    ]
    assert len(said) == len(expected), said
    for text, (beginning, part) in zip(said, expected, strict=True):
        assert text.startswith(beginning) and part in text, text


def test_check_imports_modules_beside_the_recipe(cli, content: dict[str, Any], tmp_path: Path) -> None:
    for name in ("architecture", "residual_scale"):
        del content["model"][name]
    content["optimizer"], content["schedule"] = {"kind": "beside_it:Own"}, {"warmup_steps": 2}
    content["training"] |= {"loss_terms": {}, "components": {}}
    content["tracking"]["trackers"], content["evaluation"]["tasks"] = {}, []
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    (tmp_path / "beside_it.py").write_text("import torch\nclass Own(torch.optim.SGD):\n    1/0\n")
    done = cli("check", tmp_path / "recipe.yaml")
    assert done.returncode == 2 and "importing beside_it failed: ZeroDivisionError" in done.stderr
    (tmp_path / "beside_it.py").write_text("import torch\nclass Own(torch.optim.SGD):\n    pass\n")
    assert cli("check", tmp_path / "recipe.yaml").returncode == 0
    done = cli("check", tmp_path / "recipe.yaml", "optimizer.kind=beside_i:Own")
    assert done.returncode == 2 and "Did you mean beside_it?" in done.stderr and str(tmp_path) in done.stderr


def test_objects_of_this_process_train_and_their_source_is_recorded(content: dict[str, Any]) -> None:
    for name in ("architecture", "residual_scale"):
        del content["model"][name]
    content["optimizer"], content["schedule"] = {"lr": 1e-3}, {"warmup_steps": 2}
    content["training"] |= {"loss_terms": {}, "components": {}, "steps": 4}
    content["tracking"]["trackers"], content["evaluation"]["tasks"] = {}, []

    class Sign(torch.optim.Optimizer):
        def __init__(self, params, lr=1e-3, scale=1.0):
            super().__init__(params, {"lr": lr, "scale": scale})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for each in group["params"]:
                    each.sub_(group["lr"] * group["scale"] * each.grad.sign())

    class Steps(TrainingComponent):
        def __init__(self):
            self.seen = []

        def after_step(self, end):
            self.seen.append(end.step)

    recipe, steps, losses = hlat.load_recipe(content), Steps(), []
    given = {"optimizer": functools.partial(Sign, scale=0.5), "components": [steps]}
    result = hlat.train(recipe, **given, on_step=lambda end: losses.append(end.loss))
    assert result.finished and steps.seen == [1, 2, 3, 4] and losses[-1] == pytest.approx(result.loss)
    attempts = [json.loads(line) for line in (result.run_dir / "attempts.jsonl").read_text().splitlines()]
    (name,) = [name for name in attempts[-1]["parts"] if name.endswith("Sign")]
    assert "each.grad.sign()" in attempts[-1]["parts"][name]
    saved = yaml.safe_load((result.run_dir / "recipe.yaml").read_text())
    assert saved["optimizer"]["kind"] == name and saved["optimizer"]["scale"] == 0.5
    with pytest.raises(LaunchError, match="objects of this process, and others have none"):
        hlat.train(recipe, **given, nproc=2)


def test_a_changed_source_is_said_at_the_next_start(content: dict[str, Any], tmp_path: Path, monkeypatch) -> None:
    for name in ("architecture", "residual_scale"):
        del content["model"][name]
    content["optimizer"], content["schedule"] = {"kind": "changing_part:Own", "lr": 1e-3}, {"warmup_steps": 2}
    content["training"] |= {"loss_terms": {}, "components": {}, "steps": 4, "stop_after": 2}
    content["tracking"]["trackers"], content["evaluation"]["tasks"] = {}, []
    monkeypatch.syspath_prepend(str(tmp_path))
    said = []
    for comment in ("# first", "# second"):
        (tmp_path / "changing_part.py").write_text(
            f"import torch\nclass Own(torch.optim.SGD):\n    {comment}\n    pass\n"
        )
        monkeypatch.delitem(__import__("sys").modules, "changing_part", raising=False)
        __import__("linecache").clearcache()
        stream = io.StringIO()
        run(parse_recipe(content), stream=stream)
        said.append("changed since the last start: the source of changing_part:Own" in stream.getvalue())
    assert said == [False, True] and events_of(Path(content["run"]["dir"]), "resume")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_of_progress_is_shown_where_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream, now = Terminal(), [0.0]
    assert StepLine.can_be_seen(stream) and not StepLine.can_be_seen(io.StringIO())
    line = StepLine(stream, 3, clock=lambda: now[0])
    for step, now[0] in ((1, 0.0), (2, 0.1), (3, 0.9)):
        line.show(step, lambda step=step: 9.0 - step, step == 3)
    first, last = stream.getvalue().removeprefix("\r").split("\r")  # the second step came too soon
    assert first == "step 1/3  33.3%  eta -  loss 8.0000"
    assert last.rstrip() == "step 3/3  100.0%  eta 0:00:00  loss 6.0000" and last.endswith("\n")


def test_the_preparation_of_text_is_shown_too_unless_quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TERM", "xterm")
    (tmp_path / "text.txt").write_text("the quick brown fox " * 500)
    recipe = {
        "model": {"vocab_size": 64, "layers": 1, "hidden_size": 16, "intermediate_size": 32, "heads": 2},
        "data": {"path": str(tmp_path / "text.txt"), "sequence_length": 16, "tokenizer": {"train": "char"}},
        "training": {"steps": 2},
    }
    for quiet in (False, True):
        recipe["run"] = {"dir": str(tmp_path / f"quiet-{quiet}"), "device": "cpu"}
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", stream := Terminal())
            hlat.train(hlat.load_recipe(recipe), quiet=quiet)
        said = stream.getvalue()
        assert ("preparing data" in said) == ("step 2/2" in said) == (not quiet), said
