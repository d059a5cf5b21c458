"""Requests of tasks: files, their mistakes, and their tokens, which are those that lm-eval would ask for."""

import json

import pytest

from hlat.data.tokenizers.training import train_bpe, train_char
from hlat.runtime.errors import DataError
from hlat.training.validation.evaluation import Evaluation
from hlat.training.validation.tasks import (
    PromptSet,
    TaskRequest,
    encode_requests,
    read_requests,
    row_lengths,
    task_scores,
    write_requests,
)

TEXT = "the cat sat on the mat and the dog sat on the log. what did the cat do? it sat on the mat. "


def request(**changes: object) -> TaskRequest:
    values = {"task": "qa", "group": 0, "context": "the cat", "continuation": " sat", "is_gold": True}
    return TaskRequest(**{**values, **changes})


def test_a_file_is_read_as_it_was_written(tmp_path):
    wanted = [request(), request(group=1, context="", continuation="\n<script> ü \u2028", characters=7)]
    write_requests(tmp_path / "qa.jsonl", wanted)
    assert read_requests([tmp_path / "qa.jsonl"]) == wanted


def test_every_mistake_of_every_file_is_listed(tmp_path):
    line = request().model_dump(exclude_none=True)
    lines = [line, {**line, "is_gold": "yes"}, {**line, "more": 1}, {**line, "group": 9, "is_gold": False}]
    (tmp_path / "a.jsonl").write_text("\n".join([*map(json.dumps, lines), "{", ""]))
    (tmp_path / "b.jsonl").write_text("\n")
    with pytest.raises(DataError) as caught:
        read_requests([tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "missing.jsonl"])
    message = str(caught.value)
    for part in ("line 2: is_gold", "line 3: more", "line 5", "group 9: no answer", "b.jsonl has no", "missing.jsonl"):
        assert part in message


def test_tokens_are_those_of_the_whole_text():
    """As in lm-eval: white space moves to the continuation, whose tokens are what the whole text has after them."""
    tokenizer = train_bpe([TEXT * 50], 300)
    (row,) = encode_requests([request(context="the cat ", continuation="sat on")], tokenizer, 100)
    assert tokenizer.decode(list(row.tokens)) == "the cat sat on"
    assert tokenizer.decode(list(row.tokens[-row.asked :])) == " sat on"
    assert list(row.tokens) == tokenizer.encode("the cat sat on")


def test_a_long_context_loses_its_beginning_and_an_empty_one_begins_with_the_end_token():
    tokenizer = train_bpe([TEXT * 50], 300)
    long, empty = encode_requests([request(context=TEXT), request(context="", continuation="sat")], tokenizer, 8)
    assert len(long.tokens) == 9
    assert long.tokens == tuple(tokenizer.encode(TEXT.rstrip() + "  sat"))[-9:]
    assert empty.tokens == (tokenizer.eos_id, *tokenizer.encode("sat"))


def test_what_cannot_be_asked_is_refused_with_all_places():
    tokenizer = train_char(TEXT)
    with pytest.raises(DataError, match=r"group 0: the context is empty.*\n.*group 3: the continuation has 10 tokens"):
        encode_requests([request(context=""), request(group=3, continuation="the dog is")], train_char(TEXT), 8)
    assert encode_requests([request()], tokenizer, 8)[0].asked == 4


def test_scores_are_those_of_their_definitions():
    """By hand: two questions with two choices, one answered right only per character; bits per byte of gold answers."""
    choices = [
        (request(group=0, continuation=" ab", is_gold=True), -2.0),
        (request(group=0, continuation=" abcdef", is_gold=False), -3.0),
        (request(group=1, continuation=" a", is_gold=False), -1.0),
        (request(group=1, continuation=" abcd", is_gold=True), -2.0),
        (request(task="gold", continuation=" é", is_gold=True), -0.6931471805599453 * 6),
        (request(task="gold", continuation=" ee", is_gold=True), -0.6931471805599453 * 9),
    ]
    scores = task_scores(*zip(*choices, strict=True))
    assert scores["qa"].examples == 2
    assert scores["qa"].accuracy == 0.5  # 0 is right, 1 is wrong
    assert scores["qa"].normalized_accuracy == 0.5  # -2/2 < -3/6: wrong; -1/1 < -2/4: right
    assert scores["qa"].bits_per_byte == pytest.approx((2 / 3 + 2 / 5) / 2 / 0.6931471805599453)
    assert scores["gold"].accuracy is None
    assert scores["gold"].bits_per_byte == pytest.approx(6 / 3)
    assert scores["gold"].columns("gold") == {"task/gold/bits_per_byte": pytest.approx(2.0)}


@pytest.mark.parametrize("change", [{"continuation": " dog"}, {"is_gold": False}, {"characters": 2}, {"task": "other"}])
def test_requests_that_were_changed_since_a_checkpoint_are_told(change):
    """Each of them changes scores, also those that change no token."""
    tokenizer = train_char(TEXT)

    def evaluation(asked: TaskRequest) -> Evaluation:
        rows = encode_requests([asked], tokenizer, 50)
        return Evaluation(None, {}, {}, [asked], rows, PromptSet((), (), tokenizer, 0), 50, 1)

    saved = evaluation(request()).identity
    assert evaluation(request()).changes_since(saved) == []
    assert evaluation(request(**change)).changes_since({}) == []  # of a version that recorded nothing
    [found] = evaluation(request(**change)).changes_since(saved)
    assert "requests of evaluation.tasks" in found.path and found.old != found.new


@pytest.mark.parametrize(
    ("longest", "multiple", "lengths"),
    [(1024, 1, [128, 256, 512, 1024]), (1536, 512, [1536]), (2048, 512, [512, 1024, 2048]), (100, 4, [100])],
)
def test_rows_are_padded_to_halves_of_the_longest_that_context_parallel_ranks_can_share(longest, multiple, lengths):
    assert row_lengths(longest, multiple) == lengths
    assert all(length % multiple == 0 for length in lengths)
