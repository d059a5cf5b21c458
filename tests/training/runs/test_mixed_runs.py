"""Runs on mixtures, packed and isolated: messages about the data, and the same data in every layout."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def two_sources(recipe_file: Path, corpus: Path, tmp_path: Path) -> list[str]:
    """Overrides for two halves of the corpus, mixed 3:1."""
    halves = [sorted(corpus.glob("*.txt"))[start::2] for start in (0, 1)]
    for name, files in zip(("even", "odd"), halves, strict=True):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
    sources = "\n".join(
        f"    - {{name: {name}, path: {tmp_path / name}, weight: {weight}, max_epochs: 20}}"
        for name, weight in (("even", 3), ("odd", 1))
    )
    text = recipe_file.read_text().replace("data:\n", f"data:\n  sources:\n{sources}\n")
    recipe_file.write_text(text)
    return [f"run.dir={tmp_path / 'run'}", "tracking.console=plain"]


def _data_of(run: Path) -> list[tuple[int, int]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["batch_crc32"]) for line in lines]


@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        pytest.param(
            "prepared", ["parallel.tensor=2", "memory.activation_checkpointing=selective"], marks=pytest.mark.slow
        ),
        ("online", ["parallel.context=2"]),
    ],
)
def test_a_packed_isolated_mixture_is_the_same_data_in_two_processes(
    cli, recipe_file, two_sources, tmp_path, mode, layout
):
    """tests/distributed shows that the model is the same too."""
    if mode == "online":
        text = recipe_file.read_text().replace(", max_epochs: 20", "").replace("data:\n", "data:\n  streams: 8\n")
        recipe_file.write_text(text)
    more = [f"data.mode={mode}", "data.packing=best-fit", "data.isolate=true", "training.steps=20"]
    done = cli("train", recipe_file, *two_sources, *more)
    assert done.returncode == 0, done.stderr
    if mode == "prepared":
        assert all(part in done.stdout for part in ("epochs of even", "best-fit: ", "are longer than a sequence"))
    shared = [f"run.dir={tmp_path / 'other'}", f"data.prepared_dir={tmp_path / 'run' / 'data'}"]
    again = cli("train", recipe_file, *shared, *more, "tracking.console=plain", "--nproc", "2", *layout)
    assert again.returncode == 0, again.stderr
    assert _data_of(tmp_path / "other") == _data_of(tmp_path / "run")


def test_a_source_too_short_for_the_run_is_refused_before_it_starts(cli, recipe_file, two_sources, tmp_path):
    done = cli("train", recipe_file, *two_sources, "training.steps=100000")
    assert done.returncode == 2, done.stdout
    assert "source even: the run takes 19,200,000 tokens of it" in done.stderr and "too few" in done.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()
