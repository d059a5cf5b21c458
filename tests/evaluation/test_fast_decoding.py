"""Fast decoding: the texts of transformers, alone and together, and the model as before afterwards."""

from typing import Any

import pytest
import torch

from hlat.evaluation import generate, next_token
from hlat.evaluation.generation import BatchGenerator, GenerationRequest, plan_generation
from hlat.evaluation.next_token import FEWEST_TOKENS, prepare_to_generate
from hlat.model import Decoder
from hlat.model.decoding import compile_step
from hlat.parallel import ForwardModel
from hlat.runtime.backend.cpu import CpuBackend
from tests.support.model.families import FAMILIES, WITHOUT_STEP, config_of, our_model, tokens_of, twin

CPU = torch.device("cpu")
NEW = 24
STEM = list(range(100, 130))  # computed once, in front of the padding
PROMPTS = [[5, 17, 3, 99, 200, 31], [8, 8, 150], [210, 0, 1, 44, 90, 12, 7, 7, 33, 101, 9], [8, 8, 150, 2, 64]]
PROMPTS += [STEM + rest for rest in ([7], [8, 8, 150, 2, 64, 3, 3], [210, 0, 1])]
has_step = pytest.mark.skipif(compile_step(our_model(config_of("tied"))) is None, reason="no AVX2, or no C compiler")


def text_of_transformers(theirs: torch.nn.Module, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def _cases() -> list[Any]:
    """Every family as it is trained by default, and one of each kind of block with separate matrices."""
    separate = ("llama31-gqa", "olmo2-mha", "qwen3-norm-bias-tied")
    return [pytest.param(family, True, id=family) for family in FAMILIES] + [
        pytest.param(family, False, marks=[] if family in separate else [pytest.mark.slow], id=f"{family}, separate")
        for family in FAMILIES
    ]


@has_step
@pytest.mark.parametrize(("family", "coalesce"), _cases())
def test_texts_of_any_length_are_those_of_transformers(family: str, coalesce: bool) -> None:
    """Alone on a model as it was built, and together, padded, on one that is prepared for good."""
    model = our_model(config_of(family, coalesce=coalesce))
    theirs = twin(model, torch.float32).eval()
    expected = [text_of_transformers(theirs, prompt) for prompt in PROMPTS]
    assert len({token for text in expected for token in text}) > 10, "constant texts would prove little"
    assert [generate(model, prompt, NEW) for prompt in PROMPTS] == expected
    assert model.step is None
    prepare_to_generate(model)
    assert (model.step is None) == (family in WITHOUT_STEP)
    generator = BatchGenerator(ForwardModel(model, CPU), frozenset(), str)
    batches = plan_generation([GenerationRequest(tuple(prompt), NEW) for prompt in PROMPTS])
    assert [batch.stem for batch in batches] == [len(STEM), 0] and all(len(batch.requests) > 2 for batch in batches)
    texts = {}
    for batch in batches:
        texts |= dict(zip(batch.order, generator.generate(batch), strict=True))
    assert [texts[index] for index in range(len(PROMPTS))] == expected


@has_step
def test_a_model_is_as_before_after_the_block() -> None:
    """Within the block its weights are used where they are, and are not copied."""
    model, ids = our_model(config_of("tied")), tokens_of(config_of("tied"))
    before, embedding = model(ids), model.head.matrix.data_ptr()
    with pytest.raises(RuntimeError, match="stop"), next_token.fast_decoding(model, 1):
        assert model.step is not None and "forward" in vars(model.head)
        assert model.step._matrix_VD.data_ptr() == embedding
        assert torch.equal(model(ids), before), "logits of many rows are the head's own"
        raise RuntimeError("stop")
    assert model.step is None and "forward" not in vars(model.head)
    assert torch.equal(model(ids), before)


@has_step
def test_weights_of_mixed_precision_are_copied_if_memory_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies in bf16 of fp32 weights, at most a quarter of the machine's memory; otherwise torch decodes."""
    model = our_model(config_of("llama31-gqa"))
    model.compute = torch.bfloat16
    copies = 2 * sum(parameter.numel() for parameter in model.parameters())
    for missing in (0, 1):
        monkeypatch.setattr(CpuBackend, "memory_bytes", lambda self, device, missing=missing: 4 * copies - missing)
        with next_token.fast_decoding(model, 1):
            assert (model.step is not None) == (missing == 0)
    monkeypatch.undo()
    stored = our_model(config_of("llama31-gqa"), torch.bfloat16)
    assert generate(model, PROMPTS[0], NEW) == generate(stored, PROMPTS[0], NEW)


def test_without_a_step_weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_token, "compile_step", lambda decoder: None)
    model, other = our_model(config_of("tied")), our_model(config_of("tied"))

    def is_packed(decoder: Decoder) -> bool:
        return any("forward" in vars(module) for module in decoder.modules())

    packs = CpuBackend("cpu").packs_weights
    with next_token.fast_decoding(model, FEWEST_TOKENS):
        assert is_packed(model) == packs and model.step is None
    prepare_to_generate(other)
    assert is_packed(other) == packs and not is_packed(model)
