"""The adapter answers what lm-eval's own model ``hf`` answers on the same folder, instance by instance."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hlat.checkpoint import import_model
from hlat.evaluation.responses import ServedModel, ServingOptions, serve_model
from hlat.runtime.distributed.join import join_run
from hlat.runtime.errors import DataError
from tests.support.evaluation.text_model import write_text_model

pytest.importorskip("lm_eval", reason="the extra [eval] is not installed")
pytest.importorskip("accelerate", reason="lm-eval's model hf, the witness, needs accelerate")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from hlat.evaluation.harness.adapter import HarnessModel

PAIRS = [
    ("Question: 3 + 4 = 7\nAnswer:", " yes"),
    ("Question: 3 + 4 = 7\nAnswer:", " no"),
    ("Question: 3 + 4 = 7\nAnswer: ", "no"),  # the space belongs to the continuation
    ("", "the cat sees"),
    ("the", " river and builds 12 engines"),
    ("<s>a cat", " sees"),  # begins with the begin token already
    ("the cat sees a river. " * 40, " yes and no" * 3),  # too long
]
TEXTS = ["the cat sees a river", "def return " * 60, "ünïcödé"]
CONTEXTS = ["Question: the cat\nAnswer:", "def", "the cat sees a river. " * 30, "for in 3 + 4", "a"]


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def ask(folder: Path, cache: Path, work: Callable[[HarnessModel], Any], **settings: Any) -> Any:
    def run(served: ServedModel) -> Any:
        return work(HarnessModel(served, seed=1, **settings))

    return serve_model(folder, ServingOptions(), join_run(), cache, lambda *_: None, run)


@pytest.fixture(scope="module", params=[True, False], ids=["begin-token", "no-begin-token"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("model"), begin=request.param)


@pytest.fixture(scope="module")
def witness(folder: Path) -> HFLM:
    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=3)


def test_log_probabilities_equal_those_of_lm_eval(folder: Path, witness: HFLM, tmp_path: Path) -> None:
    requests = instances("loglikelihood", PAIRS)
    expected = witness.loglikelihood(requests, disable_tqdm=True)
    # 1e-4: sums of up to 100 log-probabilities of about 10, in fp32, in another order
    found = ask(folder, tmp_path, lambda model: model.loglikelihood(requests))
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)


def test_rolling_log_probabilities_equal_those_of_lm_eval(folder: Path, witness: HFLM, tmp_path: Path) -> None:
    requests = instances("loglikelihood_rolling", [(text,) for text in TEXTS])
    expected = witness.loglikelihood_rolling(requests, disable_tqdm=True)
    found = ask(folder, tmp_path, lambda model: model.loglikelihood_rolling(requests))
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-4)


@pytest.mark.parametrize("until", [["\n\n"], ["e", "ou"], [" "], []])
def test_greedy_texts_equal_those_of_lm_eval(folder: Path, witness: HFLM, tmp_path: Path, until: list[str]) -> None:
    settings = {"until": until, "max_gen_toks": 24, "do_sample": False}
    requests = instances("generate_until", [(context, settings) for context in CONTEXTS])
    expected = witness.generate_until(requests, disable_tqdm=True)
    assert ask(folder, tmp_path, lambda model: model.generate_until(requests)) == expected
    assert len(set(expected)) > 2


def test_a_checkpoint_answers_as_the_folder_it_was_imported_from(tmp_path: Path) -> None:
    source = write_text_model(tmp_path / "model")
    requests = instances("loglikelihood", PAIRS)
    answers = [
        ask(each, tmp_path / "cache", lambda model: model.loglikelihood(requests))
        for each in (source, import_model(source, tmp_path / "imported"))
    ]
    assert answers[0] == answers[1]


def test_repeats_of_a_sampled_request_are_different_and_repeatable(folder: Path, tmp_path: Path) -> None:
    settings = {"until": ["\n"], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0, "top_p": 0.9}
    requests = instances("generate_until", [(CONTEXTS[0], settings)]) * 5
    texts = ask(folder, tmp_path / "one", lambda model: model.generate_until(requests))
    assert len(set(texts)) > 1
    assert ask(folder, tmp_path / "other", lambda model: model.generate_until(requests)) == texts


def test_more_new_tokens_than_the_model_has_room_for_are_refused(folder: Path, tmp_path: Path) -> None:
    requests = instances("generate_until", [("a", {"until": [], "max_gen_toks": 160})])
    with pytest.raises(DataError, match=r"160 new tokens.*160 at most.*--max-tokens 80"):
        ask(folder, tmp_path, lambda model: model.generate_until(requests))
    assert ask(folder, tmp_path, lambda model: model.generate_until(requests), max_new_tokens=8)
