"""Stages of a run read every text once: counted on corpora in which no character occurs twice."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hlat.config import Recipe, parse_recipe
from hlat.data.prepare.preparation import prepare
from hlat.data.prepared.prepared_folder import PreparedData
from hlat.data.samples.stages import readings, same_texts
from hlat.data.samples.training_data import TrainingData
from hlat.runtime.errors import DataError

FIRST = 0x4E00  # of twenty thousand letters, each of them a token
DOCUMENTS = {"a": (50, 60), "b": (90, 40)}  # documents of a source, and letters of each


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreparedData]:
    folder, letter = tmp_path_factory.mktemp("unique"), FIRST
    for name, (count, length) in DOCUMENTS.items():
        (folder / name).mkdir()
        for number in range(count):
            (folder / name / f"{number:03}.txt").write_text("".join(map(chr, range(letter, letter + length))))
            letter += length
    recipe = staged(folder, [{"steps": 1}], weights=None)
    return folder, prepare(recipe.data, folder / "prepared", workers=1)


def staged(folder: Path, stages: list[dict[str, Any]], weights: tuple[int, int] | None, **data: Any) -> Recipe:
    sources = [{"path": str(folder / name), "name": name} for name in DOCUMENTS]
    for source, weight in zip(sources, weights or (), strict=False):
        source["weight"] = weight
    return parse_recipe(
        {
            "model": {"vocab_size": 8192, "layers": 1, "hidden_size": 8, "intermediate_size": 8, "heads": 1},
            "data": {
                "sources": sources,
                "tokenizer": {"train": "char", "eos_token": None},
                "validation": {"fraction": 0},
                "sequence_length": 8,
                **data,
            },
            "batch": {"global_batch": 4, "micro_batch": 1},
            "stages": [{"name": f"s{number}", **stage} for number, stage in enumerate(stages)],
        }
    )


def rows_of(recipe: Recipe, prepared: PreparedData) -> list[list[np.ndarray]]:
    """Return the tokens of each sample that each stage reads; padding is left out."""
    found = []
    for stage in recipe.each_stage():
        place = stage.place
        assert place is not None
        first, stop = place.batches.first_of(place.first), place.batches.first_of(place.stop)
        data = TrainingData(prepared, stage.data, 3, readings(stage), first)
        batch = data.batch(first, stop - first)
        found.append([row[label >= 0].numpy() for row, label in zip(batch.inputs_BS, batch.labels_BS, strict=True)])
    return found


def drawn_stages(rng: random.Random, weighted: bool) -> list[dict[str, Any]]:
    """Two to four stages that read about a half of the text in all, with rows of two lengths at least."""
    count = rng.randint(2, 4)
    lengths = [rng.choice((8, 16, 32)) for _ in range(count)]
    lengths[-1] = 24 if len(set(lengths)) == 1 else lengths[-1]
    return [
        {
            "steps": max(1, 1500 // count // (4 * length)),
            "data": {"sequence_length": length},
            **({"weights": {"a": rng.randint(1, 3), "b": rng.randint(1, 3)}} if weighted else {}),
        }
        for length in lengths
    ]


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
@pytest.mark.parametrize("weighted", [True, False])
def test_no_token_is_read_twice(corpus, packing, weighted):
    folder, prepared = corpus
    rng, cut = random.Random(f"{packing} {weighted}"), 0
    for _ in range(12):
        stages = drawn_stages(rng, weighted)
        recipe = staged(folder, stages, (1, 1) if weighted else None, packing=packing)
        rows = rows_of(recipe, prepared)
        assert [len(each) for each in rows] == [4 * stage["steps"] for stage in stages]
        read = Counter(token for each in rows for row in each for token in row.tolist())
        assert max(read.values()) == 1, "within one pass no token is read twice"
        # Rows of another length begin with another document, or a huge one that is cut: none of these is.
        by_length: dict[int, set[int]] = {}
        for stage, each in zip(stages, rows, strict=True):
            tokens = {token for row in each for token in row.tolist()}
            by_length.setdefault(stage["data"]["sequence_length"], set()).update(documents_of(prepared, tokens))
        if len(stages) == 2:
            cut += len(set.intersection(*by_length.values())) if len(by_length) == 2 else 0
    assert cut == 0, "documents are shared out whole"


def documents_of(prepared: PreparedData, tokens: set[int]) -> set[int]:
    starts = prepared.document_boundaries("train").astype(np.int64)
    corpus = np.asarray(prepared.tokens("train").read(0, int(starts[-1])))
    places = np.flatnonzero(np.isin(corpus, list(tokens)))
    return set(np.searchsorted(starts, places, side="right").tolist())


def test_stages_with_the_same_rows_go_on_in_the_order_of_one_run(corpus):
    folder, prepared = corpus
    parts = rows_of(staged(folder, [{"steps": 7}, {"steps": 3}, {"steps": 5}], None), prepared)
    (whole,) = rows_of(staged(folder, [{"steps": 15}], None), prepared)
    assert [row.tolist() for part in parts for row in part] == [row.tolist() for row in whole]


def test_a_source_at_another_place_of_the_list_goes_on(corpus):
    folder, prepared = corpus
    turned = [{"path": str(folder / name) + "/", "name": name, "weight": 1} for name in ("b", "a")]
    stages = [{"steps": 20}, {"steps": 20, "data": {"sources": turned}}]
    first, second = staged(folder, stages, (1, 1), prepared_dir=str(folder / "prepared")).each_stage()
    other = prepare(second.data, folder / "turned", workers=1)
    read = Counter[int]()
    for stage, data, sample in ((first, prepared, 0), (second, other, 80)):
        batch = TrainingData(data, stage.data, 3, readings(stage), sample).batch(sample, 80)
        read.update(batch.inputs_BS.flatten().tolist())
    assert len(read) == 160 * 8, "no letter twice"


def test_a_stage_that_restarts_reads_from_the_beginning(corpus):
    folder, prepared = corpus
    first, again, named = rows_of(
        staged(folder, [{"steps": 4}, {"steps": 4, "restart": True}, {"steps": 4, "restart": ["a"]}], (1, 1)), prepared
    )
    assert [row.tolist() for row in again] == [row.tolist() for row in first]
    of_a = {source: sum(documents_of(prepared, set(row.tolist())) <= set(range(1, 51)) for row in rows)
            for source, rows in (("first", first), ("named", named))}  # fmt: skip
    assert of_a["first"] == of_a["named"] == 8
    read_again = {tuple(row) for row in first} & {tuple(row) for row in named}
    assert len(read_again) == 8, "source a is read anew, b goes on"


@pytest.mark.parametrize(
    ("stages", "weights", "said"),
    [
        ([{"steps": 400}, {"steps": 1, "data": {"sequence_length": 16}}], (1, 1), "none are left for it"),
        ([{"steps": 2}, {"steps": 2, "weights": {"a": 1, "b": 1}}], None, "which part is not known"),
        ([{"steps": 2}, {"steps": 2, "data": {"sources": "limited"}}], (1, 1), "another max_tokens"),
    ],
    ids=["used up", "mixed", "limited"],
)
def test_what_cannot_be_read_once_is_refused(corpus, stages, weights, said):
    folder, prepared = corpus
    limited = [{"path": str(folder / name), "name": name, "weight": 1, "max_tokens": 900} for name in DOCUMENTS]
    stages = [{**stage, "data": {"sources": limited}} if "sources" in stage.get("data", ()) else stage
              for stage in stages]  # fmt: skip
    with pytest.raises(DataError, match=said):
        rows_of(staged(folder, stages, weights), prepared)


def test_sources_that_repeat_are_one_order_over_stages_and_without_any(corpus):
    folder, prepared = corpus
    repeated = [{"path": str(folder / name), "name": name, "repeat": 2} for name in DOCUMENTS]
    stages = [{"steps": 7}, {"steps": 8}]
    parts = rows_of(staged(folder, stages, None, sources=repeated), prepared)
    (whole,) = rows_of(staged(folder, [{"steps": 15}], None, sources=repeated), prepared)
    assert [row.tolist() for part in parts for row in part] == [row.tolist() for row in whole]
    longer = staged(folder, [*stages, {"steps": 1, "data": {"sequence_length": 16}}], None, sources=repeated)
    with pytest.raises(DataError, match="cannot be shared out"):
        rows_of(longer, prepared)
    (alone,) = [each.model_copy(update={"stages": ()}).placed(None) for each in longer.each_stage()[:1]]
    assert TrainingData(prepared, alone.data, 3, readings(alone)).batch(0, 4).inputs_BS.shape == (4, 8)


@pytest.mark.parametrize("prepared", [False, True], ids=["listed", "of the manifest"])
@pytest.mark.parametrize(
    ("paths", "more", "said"),
    [
        (["a", "a/*.txt"], {}, [1]),
        (["a", "a/007.txt"], {}, [1]),
        (["a", "link"], {}, [1]),
        (["a", "a/"], {}, []),
        (["a", "b"], {}, []),
        (["a", "a/*.txt"], {"restart": True}, []),
    ],
    ids=str,
)
def test_files_are_known_under_another_path(corpus, tmp_path, paths, more, said, prepared):
    folder, _ = corpus
    for name in ("a", "b"):
        (tmp_path / name).symlink_to(folder / name)
    (tmp_path / "link").symlink_to(folder / "a" / "003.txt")
    (tmp_path / "link.txt").symlink_to(folder / "a" / "003.txt")
    first, second = (str(tmp_path / ("link.txt" if path == "link" else path)) for path in paths)
    recipe = staged(tmp_path, [{"steps": 1}, {"steps": 1, "data": {"path": second}, **more}], None, prepared_dir=None)
    data = recipe.data.model_copy(update={"sources": (), "path": first, "prepared_dir": str(tmp_path / "first")})
    recipe = recipe.model_copy(update={"data": data})
    if prepared:
        prepare(recipe.each_stage()[0].data, recipe.each_stage()[0].prepared_dir, workers=1)
    assert [number for number, _ in same_texts(recipe, stores=False)] == said


def test_a_stage_has_no_file_twice(corpus):
    folder, _ = corpus
    twice = [{"path": str(folder / path), "name": path, "weight": 1} for path in ("a", "a/*")]
    recipe = staged(folder, [{"steps": 1}, {"steps": 1}], None, sources=twice)
    assert [number for number, _ in same_texts(recipe, stores=False)] == [0], "of both stages, told once"
    columns = [{"path": str(folder / "a"), "name": name, "weight": 1, "text_column": name} for name in ("x", "y")]
    recipe = staged(folder, [{"steps": 1}, {"steps": 1}], None, sources=columns)
    assert list(same_texts(recipe, stores=False)) == [], "two columns are two texts"
    assert readings(recipe.each_stage()[1])[1].first == 2
