"""Stand-ins of the data sets of the suites ``hlat`` and ``domain``, and a model of lm-eval that knows their answers.

    FOLDER/owner/name    as on the Hugging Face hub: Parquet files by configuration and split, or JSON Lines
    each question        "item N (key ANSWER)": how many there are in a prompt tells its examples

``HalfRight`` answers even items rightly and odd ones wrongly: on two items each metric of right answers is 50 %.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

Rows = list[dict[str, Any]]
ITEMS = {"train": 12, "dev": 12, "validation": 2, "test": 2}
"""Items by split: those that are asked, and more than any task has examples."""

_KEY = re.compile(r"item (\d+) \(key (.*?)\)")
_LETTERS = "ABCD"


def _item(number: int, key: str) -> str:
    return f"item {number} (key {key})"


def _options(number: int, count: int = 4) -> list[str]:
    """Choices, of which the one whose place is the item's number is right."""
    return ["apt" if place == number % count else f"bad {place}" for place in range(count)]


def _labelled(number: int) -> dict[str, Any]:
    choices = {"text": _options(number), "label": list(_LETTERS)}
    return {"choices": choices, "answerKey": _LETTERS[number % 4]}


def _letter(number: int) -> str:
    return _item(number, _LETTERS[number % 4])


def _named(number: int, names: tuple[str, ...]) -> str:
    return names[number % len(names)]


def _hellaswag(number: int) -> dict[str, Any]:
    row = {"activity_label": "work", "ctx_a": _item(number, "apt"), "ctx_b": "they", "label": str(number % 4)}
    return row | {"endings": _options(number)}


def _winogrande(number: int) -> dict[str, Any]:
    first, second = _options(number, 2)
    sentence = f"{_item(number, 'apt wins.')} _ wins."
    return {"sentence": sentence, "option1": first, "option2": second, "answer": str(1 + number % 2)}


def _truthfulqa(number: int) -> dict[str, Any]:
    targets = {"choices": ["apt", "bad 1", "bad 2"], "labels": [1, 0, 0]}  # the right one is the first in the data set
    return {"question": _item(number, "apt"), "mc1_targets": targets, "mc2_targets": targets}


def _crows(number: int) -> dict[str, Any]:
    texts = {each: f"{_item(number, 'more')} {each}" for each in ("more", "less")}
    return {"sent_more": texts["more"], "sent_less": texts["less"], "bias_type": "age"}


def _humaneval(number: int) -> dict[str, Any]:
    prompt = f"# {_item(number, '   return 1')}\ndef one():\n"
    return {"prompt": prompt, "test": "def check(f):\n    assert f() == 1\n", "entry_point": "one"}


def _piqa(number: int) -> dict[str, Any]:
    first, second = _options(number, 2)
    return {"goal": _item(number, "apt"), "sol1": first, "sol2": second, "label": number % 2}


def _boolq(number: int) -> dict[str, Any]:
    key = _named(number, ("no", "yes"))
    return {"passage": "a passage", "question": _item(number, key), "label": number % 2}


def _medmcqa(number: int) -> dict[str, Any]:
    options = dict(zip(("opa", "opb", "opc", "opd"), _options(number), strict=True))
    return {"question": _letter(number), "cop": number % 4, **options}


def _medqa(number: int) -> dict[str, Any]:
    endings = {f"ending{place}": text for place, text in enumerate(_options(number))}
    return {"sent1": _letter(number), "sent2": "", "label": number % 4, **endings}


def _pubmedqa(number: int) -> dict[str, Any]:
    key = _named(number, ("maybe", "no", "yes"))
    return {"QUESTION": _item(number, key), "CONTEXTS": ["one part.", "another."], "final_decision": key}


def _sciq(number: int) -> dict[str, Any]:
    wrong = {f"distractor{place}": f"bad {place}" for place in (1, 2, 3)}
    return {"support": " a text", "question": _item(number, "apt"), "correct_answer": "apt", **wrong}


def _legal(field: str, names: tuple[str, ...], **more: str) -> Callable[[int], dict[str, Any]]:
    def row(number: int) -> dict[str, Any]:
        key = _named(number, names)
        return {"index": number, field: _item(number, key), "answer": key, **more}

    return row


_YES_NO = ("Yes", "No")
_LOBBYING = {"bill_summary": "a summary", "company_name": "a company", "company_description": "makes things"}
_LEGAL = {
    "abercrombie": _legal("text", ("generic", "descriptive", "suggestive", "arbitrary", "fanciful")),
    "corporate_lobbying": _legal("bill_title", _YES_NO, **_LOBBYING),
    "function_of_decision_section": _legal("Paragraph", ("Facts", "Procedural History", "Issue")),
    "international_citizenship_questions": _legal("question", _YES_NO),
    "proa": _legal("text", _YES_NO),
}

_MAKERS: dict[str, dict[str, Callable[[int], dict[str, Any]]]] = {
    # data set: configuration: a row by its number; without a name if the data set has one configuration
    "baber/piqa": {"": _piqa},
    "Rowan/hellaswag": {"": _hellaswag},
    "allenai/winogrande": {"winogrande_xl": _winogrande},
    "allenai/ai2_arc": dict.fromkeys(
        ("ARC-Easy", "ARC-Challenge"), lambda number: {"question": _item(number, "apt"), **_labelled(number)}
    ),
    "allenai/openbookqa": {"main": lambda number: {"question_stem": _item(number, "apt"), **_labelled(number)}},
    "google-research-datasets/nq_open": {
        "nq_open": lambda number: {"question": _item(number, f"apt {number}"), "answer": [f"apt {number}", "other"]}
    },
    "mandarjoshi/trivia_qa": {
        "rc.nocontext": lambda number: {
            "question": _item(number, f"apt {number}"),
            "answer": {"value": f"apt {number}", "aliases": ["other", f"apt {number}"]},
        }
    },
    "aps/super_glue": {"boolq": _boolq},
    "openai/gsm8k": {
        "main": lambda number: {
            "question": _item(number, f"#### {number + 70}"),
            "answer": f"so it is {number + 70}\n#### {number + 70}",
        }
    },
    "openai/openai_humaneval": {"openai_humaneval": _humaneval},
    "jannalu/crows_pairs_multilingual": {"english": _crows, "french": _crows},
    "truthfulqa/truthful_qa": {"multiple_choice": _truthfulqa},
    "openlifescienceai/medmcqa": {"": _medmcqa},
    "allenai/sciq": {"": _sciq},
}


def write_stand_ins(folder: Path, mmlu: list[str], contract_nli: list[str]) -> Path:
    """Write all data sets, with these configurations of MMLU and of the contracts of LegalBench; return the folder."""

    def question(number: int) -> dict[str, Any]:
        return {"question": _letter(number), "choices": _options(number), "answer": number % 4}

    contracts = dict.fromkeys(contract_nli, _legal("text", _YES_NO))
    makers = _MAKERS | {"cais/mmlu": dict.fromkeys(mmlu, question), "nguha/legalbench": _LEGAL | contracts}
    for name, configurations in makers.items():
        _write_parquet(folder / name, configurations)
    medqa = folder / "GBaker/MedQA-USMLE-4-options-hf"
    medqa.mkdir(parents=True)
    for split, stored in (("train", "train"), ("validation", "dev"), ("test", "test")):
        (medqa / f"{stored}.json").write_text(_lines(_rows(_medqa, split)))
    (folder / "pubmedqa_test.jsonl").write_text(_lines(_rows(_pubmedqa, "test")))
    return folder


def _rows(maker: Callable[[int], dict[str, Any]], split: str) -> Rows:
    return [maker(number) for number in range(ITEMS[split])]


def _lines(rows: Rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _write_parquet(folder: Path, configurations: dict[str, Callable[[int], dict[str, Any]]]) -> None:
    card = []
    for name, maker in configurations.items():
        inside = name or "data"
        (folder / inside).mkdir(parents=True)
        for split in ITEMS:
            pa.parquet.write_table(
                pa.Table.from_pylist(_rows(maker, split)), folder / inside / f"{split}-00000.parquet"
            )
        files = [{"split": split, "path": f"{inside}/{split}-*"} for split in ITEMS]
        card.append({"config_name": name or "default", "data_files": files})
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': card})}---\n")


class HalfRight(LM):  # type: ignore[misc]  # lm-eval has no types
    """Model that reads the answer in the question; it keeps the numbers of examples in the prompts of each task."""

    def __init__(self) -> None:
        super().__init__()
        self.shots: dict[str, set[int]] = {}

    def loglikelihood(self, requests: list[Instance], **_: Any) -> list[tuple[float, bool]]:
        return [(0.0 if is_liked else -50.0, is_liked) for is_liked in self._liked(requests)]

    def _liked(self, requests: list[Instance]) -> Iterator[bool]:
        for request in requests:
            text = "".join(request.args).strip()
            number, key = self._asked(request.task_name, text)
            yield text.endswith(key) == (number % 2 == 0)

    def loglikelihood_rolling(self, requests: list[Instance], **_: Any) -> list[float]:
        raise AssertionError("no task of the suites asks for this")

    def generate_until(self, requests: list[Instance], **_: Any) -> list[str]:
        asked = [self._asked(request.task_name, request.args[0]) for request in requests]
        return [f" {key}" if number % 2 == 0 else " wrong" for number, key in asked]

    def _asked(self, task: str, text: str) -> tuple[int, str]:
        found = _KEY.findall(text)
        self.shots.setdefault(task, set()).add(len(found) - 1)
        number, key = found[-1]
        return int(number), key
