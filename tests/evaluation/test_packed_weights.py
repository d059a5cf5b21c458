"""Packed weights: the product of the same numbers, the texts of transformers, the model as before afterwards."""

import copy

import pytest
import torch

from hlat.evaluation import generate
from hlat.evaluation.generation import BatchGenerator, GenerationRequest, plan_generation
from hlat.evaluation.next_token import FEWEST_TOKENS, PackedProduct, pack_weights, packed_weights
from hlat.model import Decoder, Linear
from hlat.model.kernels import matmul as products
from hlat.parallel import ForwardModel
from hlat.runtime.backend.cpu import CpuBackend
from hlat.runtime.backend.table import backend_of
from tests.support.model.families import FAMILIES, config_of, our_model, twin

CPU = torch.device("cpu")
NEW = FEWEST_TOKENS + 8
PROMPTS = [[5, 17, 3, 99, 200, 31], [8, 8, 150, 2, 64, 7], [210, 0, 1, 44, 90, 12]]
pytestmark = pytest.mark.skipif(not backend_of(CPU).packs_weights, reason="this torch has no oneDNN")


def texts_of_transformers(model: Decoder) -> list[list[int]]:
    ids = torch.tensor(PROMPTS)
    theirs = twin(model, torch.float32).eval()
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        return theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_models_generate_the_tokens_of_transformers(family):
    """One text at a time with copies, and all together on a model that is packed for good."""
    model = our_model(config_of(family))
    expected = texts_of_transformers(model)
    assert len({token for text in expected for token in text}) > 10, "constant texts would prove little"
    assert [generate(model, prompt, NEW) for prompt in PROMPTS] == expected
    pack_weights(model)
    generator = BatchGenerator(ForwardModel(model, CPU), frozenset(), str)
    (batch,) = plan_generation([GenerationRequest(tuple(prompt), NEW) for prompt in PROMPTS])
    texts = dict(zip(batch.order, generator.generate(batch), strict=True))
    assert [texts[index] for index in range(len(PROMPTS))] == expected


def assert_rounded_product(got, x, weight, bias, rounding):
    """The error of a sum of K terms in fp32 is K units of 2**-24 of their magnitudes (Higham 2002, section 3.1).

    The bias is one more term. The sum, which has that error already, is then rounded once to the dtype.
    """
    bias = torch.zeros(len(weight)) if bias is None else bias
    exact = x.double() @ weight.double().T + bias.double()
    of_sum = (weight.shape[1] + 1) * 2.0**-24 * (x.double().abs() @ weight.double().abs().T + bias.double().abs())
    assert ((got.double() - exact).abs() <= of_sum + rounding * (exact.abs() + of_sum)).all()


@pytest.mark.parametrize("rows", [1, 8, 200])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-8)])
@pytest.mark.parametrize("outputs", [48, 8192 + 40])  # the second is packed in two parts
def test_a_product_by_packed_weights_is_the_product(rows, dtype, rounding, outputs):
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, 72), (outputs, 72), (outputs,))
    )
    got = PackedProduct(weight, bias, dtype)(x)
    assert got.dtype == dtype and got.shape == (rows, outputs)
    assert_rounded_product(got, x, weight, bias, rounding)


@pytest.mark.parametrize("tokens", [FEWEST_TOKENS - 1, FEWEST_TOKENS])
def test_a_model_is_as_before_after_the_block(tokens):
    model, ids = our_model(config_of("tied")), torch.tensor(PROMPTS)
    before = model(ids)
    with packed_weights(model, tokens):
        packed = [module for module in model.modules() if "forward" in vars(module)]
        assert bool(packed) == (tokens >= FEWEST_TOKENS)
        torch.testing.assert_close(model(ids), before)
    assert not [module for module in model.modules() if "forward" in vars(module)]
    assert torch.equal(model(ids), before)


def test_a_model_packed_for_good_gives_up_its_matrices_and_keeps_a_tied_embedding():
    model = our_model(config_of("tied"))
    before, embedding = model(torch.tensor(PROMPTS)), copy.deepcopy(model.embedding.weight)
    pack_weights(model)
    assert all(module.weight.numel() == 0 for module in model.modules() if isinstance(module, Linear))
    assert torch.equal(model.embedding.weight, embedding)
    torch.testing.assert_close(model(torch.tensor(PROMPTS)), before)


@pytest.fixture
def memory(monkeypatch):
    """Function that sets the memory of the machine, in bytes, and widens products of bf16 to fp32."""

    def set_memory(count):
        monkeypatch.setattr(CpuBackend, "memory_bytes", lambda self, device: count)
        monkeypatch.setattr(CpuBackend, "product_dtype", lambda self, dtype: torch.float32)
        monkeypatch.setattr(products, "_EMULATE_BF16", "cpu")

    return set_memory


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["tied", "llama2-mha"])
def test_packing_for_good_adds_at_most_a_quarter_of_the_memory(family, stored, memory):
    """Without bf16 instructions bf16 weights are packed in fp32; a head is packed beside a tied embedding."""
    for missing in (0, 1):
        model = our_model(config_of(family), stored)
        layers = sum(p.nbytes for module in model.modules() if isinstance(module, Linear) for p in module.parameters())
        head = model.head.matrix.nbytes
        widening = torch.float32.itemsize // stored.itemsize
        added = (widening - 1) * layers + (widening if family == "tied" else widening - 1) * head
        memory(4 * added - missing)
        before = model(torch.tensor(PROMPTS))
        pack_weights(model)
        packed = [module for module in model.modules() if "forward" in vars(module)]
        assert bool(packed) == (missing == 0 or added == 0)
        if packed:
            assert all(module.weight.numel() == 0 for module in packed if isinstance(module, Linear))
        else:
            assert torch.equal(model(torch.tensor(PROMPTS)), before)


def test_float64_is_not_packed():
    model = our_model(config_of("llama2-mha"), torch.float64)
    expected = model(torch.tensor(PROMPTS))
    pack_weights(model)
    assert torch.equal(model(torch.tensor(PROMPTS)), expected)


def test_weights_are_packed_in_the_dtype_in_which_the_model_computes():
    """A checkpoint of mixed precision has fp32 weights and computes in bf16."""
    model = our_model(config_of("llama31-gqa"))
    model.compute = torch.bfloat16
    linear = next(module for module in model.modules() if isinstance(module, Linear))
    x = torch.randn(8, linear.in_features, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    with packed_weights(model, NEW):
        got = linear(x)
    assert got.dtype == torch.bfloat16
    assert_rounded_product(got, x, linear.weight.detach().to(torch.bfloat16), None, 2.0**-8)
