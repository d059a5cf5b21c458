"""Runs in layouts score sets and tasks as the run in one process does, and evaluation changes no bit of them."""

import json

import pytest
import torch

from hlat.checkpoint.protocol.reader import open_checkpoint, resolve
from hlat.tracking import read_samples
from hlat.training.validation.tasks import TaskRequest, write_requests

LAYOUTS = {
    "TP 2": ["parallel.tensor=2"],
    "PP 2": ["parallel.pipeline=2"],
    "CP 2": ["parallel.context=2"],
    "DP 2": ["parallel.zero=3"],
}
SOURCES = {"first": "0-2", "second": "3-5"}
SHORT = [
    "training.steps=4",
    "schedule.warmup_steps=1",
    "tracking.console=none",
    "tracking.tensorboard=false",
    "precision.mode=fp32",
]


@pytest.fixture(scope="module")
def start(cli, corpus, tiny_recipe, tmp_path_factory):
    """Train in a folder of that name; return columns of evaluations by step, final weights, samples."""
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "recipe.yaml").write_text(tiny_recipe)
    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted(corpus.iterdir())[:5])
    (folder / "set.txt").write_text(text[:3000], encoding="utf-8")
    requests = [
        TaskRequest(
            task="next",
            group=group,
            context=text[start : start + 40],
            continuation=text[start + 40 + 70 * choice : start + 52 + 70 * choice],
            is_gold=choice == 0,
        )
        for group, start in enumerate(range(0, 2000, 100))
        for choice in range(3)
    ]
    write_requests(folder / "next.jsonl", requests)

    def train(name, *more, evaluate=True):
        halves = [{"path": f"{corpus}/0[{digits}]*.txt", "name": name} for name, digits in SOURCES.items()]
        where = [f"data.sources={json.dumps(halves)}"]
        where += [f"data.prepared_dir={folder / 'data'}", f"run.dir={folder / name}"]
        wanted = [f"evaluation.sets={{again: {folder / 'set.txt'}}}", f"evaluation.tasks=[{folder / 'next.jsonl'}]"]
        prompts = json.dumps([text[:30], text[500:560]])
        wanted.append(f"evaluation.prompts={prompts}")
        every = ["evaluation.every_steps=2", *wanted] if evaluate else ["evaluation.every_steps=null"]
        done = cli("train", folder / "recipe.yaml", *where, *SHORT, *every, *more)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        columns = {
            line["step"]: {key: value for key, value in line.items() if key.startswith(("val", "task/"))}
            for line in lines
        }
        weights = open_checkpoint(resolve(folder / name)).load("model.")
        samples = [(sample.step, sample.text) for sample in read_samples(folder / name)]
        return {step: found for step, found in columns.items() if found}, weights, samples

    return train


@pytest.fixture(scope="module")
def alone(start):
    return start("alone")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_scores_as_one_process_does(layout, start, alone):
    """After two and four steps at fp32, whose losses agree to about 1e-6; accuracies of 20 examples have no ties."""
    found, weights, samples = start(layout.replace(" ", ""), "--nproc", "2", *LAYOUTS[layout])
    wanted, _, texts = alone
    assert samples == texts and [step for step, _ in texts] == [2, 2, 4, 4] and all(text for _, text in texts)
    assert found.keys() == wanted.keys() == {2, 4}
    for step, columns in wanted.items():
        assert {"val_loss", "val/again/loss", "task/next/acc", "task/next/acc_norm"} <= columns.keys()
        assert {f"val/sources/{name}/loss" for name in SOURCES} <= columns.keys()
        assert found[step] == pytest.approx(columns, rel=1e-4)
    _, without, _ = start(f"{layout.replace(' ', '')}-without", "--nproc", "2", *LAYOUTS[layout], evaluate=False)
    assert all(torch.equal(weights[name], without[name]) for name in weights)
