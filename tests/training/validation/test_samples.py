"""Prompts are continued while training as transformers continues them from the exported weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hlat.checkpoint import export_hf, read_tokenizer
from hlat.checkpoint.protocol.reader import resolve
from hlat.model import IGNORED, CrossEntropy, next_tokens
from hlat.runtime.errors import DataError
from hlat.tracking import append_samples, read_samples
from hlat.training import run
from hlat.training.validation.losses import SingleProcessModel
from hlat.training.validation.tasks import continue_rows
from tests.support.training.evaluated_runs import recipe_of

PROMPTS = ("the cat ", "a dog sat on the", "the")


def recipe_with(folder, **settings):
    recipe = recipe_of(folder)
    return recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update=settings)})


def test_samples_are_those_of_transformers_with_the_exported_weights(tmp_path):
    run(recipe_with(tmp_path, prompts=PROMPTS, sample_tokens=40))  # rows of 32 tokens: each text fills its row
    samples = read_samples(tmp_path / "run")
    assert [(sample.step, sample.prompt) for sample in samples] == [(s, p) for s in (2, 4, 6) for p in PROMPTS]
    checkpoint = resolve(tmp_path / "run")
    export_hf(checkpoint, tmp_path / "hf")
    witness = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokenizer = read_tokenizer(checkpoint)
    for sample in samples[-3:]:
        tokens = tokenizer.encode_prompt(sample.prompt)
        for _ in range(33 - len(tokens)):  # the plain loop: transformers' forward pass, and its largest logit
            token = int(witness(torch.tensor([tokens])).logits[0, -1].argmax())
            if token == tokenizer.eos_id:
                break
            tokens.append(token)
        assert sample.text == tokenizer.decode(tokens[len(tokenizer.encode_prompt(sample.prompt)) :])


class _Counting(SingleProcessModel):
    """A model whose next token is one more than the last one, modulo 10."""

    def __init__(self):
        pass

    def evaluate_rows(self, batches, reduction=None):
        rows = [
            (inputs[labels != IGNORED] + 1) % 10
            for batch in batches
            for inputs, labels in zip(batch.inputs_BS, batch.labels_BS, strict=True)
        ]
        return torch.tensor([float(row[0]) if len(row) else 0.0 for row in rows], dtype=torch.float64)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_a_text_ends_at_the_end_token_when_full_and_after_its_most_tokens(batch_size):
    prompts = [[6], [0], [0] * 7 + [1], [2, 3]]
    found = continue_rows(_Counting(), prompts, 4, 9, 8, batch_size)
    assert found == [[7, 8], [1, 2, 3, 4], [2], [4, 5, 6, 7]]


def test_of_equal_logits_the_first_token_is_chosen_and_rows_without_a_label_give_zero():
    hidden_BSD = torch.eye(2).expand(3, 2, 2).clone()
    weight_vD = torch.tensor([[0.0, 5.0], [3.0, 1.0], [3.0, 5.0]])
    labels_BS = torch.tensor([[0, IGNORED], [IGNORED, 0], [IGNORED, IGNORED]])
    assert next_tokens(hidden_BSD, weight_vD, labels_BS, CrossEntropy()).tolist() == [1, 0, 0]


def test_prompts_longer_than_a_row_are_refused_together(tmp_path):
    long = ["the cat " * 5, "a dog sat " * 5]
    with pytest.raises(
        DataError, match=r"(?s)evaluation\.prompts:.*has 40 tokens.*has 50 tokens: a prompt has 1 to 32"
    ):
        run(recipe_with(tmp_path, prompts=(*long, "the")))


def test_of_a_repeated_step_the_last_samples_count(tmp_path):
    append_samples(tmp_path, 2, [("a", "old"), ("b", "kept")])
    append_samples(tmp_path, 4, [("a", "later")])
    append_samples(tmp_path, 2, [("a", "new")])
    assert [(sample.step, sample.prompt, sample.text) for sample in read_samples(tmp_path)] == [
        (2, "a", "new"),
        (2, "b", "kept"),
        (4, "a", "later"),
    ]
