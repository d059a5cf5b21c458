"""Operators say which operand is wrong before an address is passed to C; the model computes what torch supports."""

import random
from collections.abc import Callable

import pytest
import torch

from hlat.model import CrossEntropy
from hlat.model.document_attention import DOCUMENT_ATTENTION
from hlat.model.kernels.attention import head_sums_shape
from hlat.model.pointwise import gated, gated_fused, rms_norm, rotate
from tests.support.model.kernel_cases import Results, normal, output_and_gradients, same_bits, torch_only

OPERATORS = torch.ops.hlat
assert DOCUMENT_ATTENTION is OPERATORS.attend_within_documents.default, "its module has registered it"
WIDTH = 8


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return normal(*shape, dtype=dtype)


def right_operands() -> dict[str, dict[str, torch.Tensor]]:
    """Operands of each operator, by their names; the first one decides what the others have to be."""
    x, scale, table = rows(3, WIDTH), torch.ones(3, 1), torch.ones(3, 1, 1, WIDTH // 2)
    logits, tokens = rows(3, WIDTH), torch.ones(3)
    labels = {"logits": logits, "rows": torch.arange(3)}
    keys = {"q": rows(2, 4, 3, WIDTH), "k": rows(2, 2, 5, WIDTH), "v": rows(2, 2, 5, WIDTH)}
    results = {"grad": rows(2, 4, 3, WIDTH), "out": rows(2, 4, 3, WIDTH), "sums": torch.ones(2, 4, 3)}
    first = {"first": torch.ones(2, 3, dtype=torch.int64)}
    sums = torch.ones(head_sums_shape(2, 4, 5, WIDTH))
    return {
        "attend": keys | first,
        "attend_backward": keys | results | first,
        "attend_sums": {"key_sums": sums, "value_sums": sums.clone(), "k": keys["k"]},
        "attend_within_documents": keys | first,
        "attend_within_documents_backward": keys | results | first,
        "rms_norm": {"x": x, "weight": torch.ones(WIDTH)},
        "rms_norm_backward": {"gradient": rows(3, WIDTH), "x": x, "weight": torch.ones(WIDTH), "scale": scale},
        "rotate": {"x": rows(2, 3, 1, 1, WIDTH), "cos": table, "sin": table.clone()},
        "swiglu": {"gate": x, "up": rows(3, WIDTH)},
        "swiglu_backward": {name: rows(3, WIDTH) for name in ("gradient", "gate", "up", "by_gate", "by_up")},
        "cross_entropy_sums": labels,
        "first_equal": {"logits": logits, "values": tokens},
        "cross_entropy_gradient_": labels | {"peak": tokens, "factor": tokens.clone()},
    }


RANGES = {"spans": [1, 2, 3, 5], "window": 2}
FURTHER = {"rms_norm": {"eps": 1e-5}, "rotate": {"direction": 1}} | {
    operator: RANGES for operator in right_operands() if operator.startswith("attend") and operator != "attend_sums"
}
OPERANDS = [(operator, name) for operator, operands in right_operands().items() for name in operands]
FIRST = {"x", "gate", "logits", "q"}
INTEGERS = {"rows", "first"}


def call(operator: str, operands: dict[str, torch.Tensor]) -> object:
    return getattr(OPERATORS, operator)(**operands, **FURTHER.get(operator, {}))


@pytest.mark.parametrize("operator", right_operands())
def test_right_operands_pass(operator: str) -> None:
    call(operator, right_operands()[operator])


@pytest.mark.parametrize(("operator", "name"), OPERANDS)
def test_an_operand_of_another_dtype_is_named(operator: str, name: str) -> None:
    operands = right_operands()[operator]
    operands[name] = operands[name].to(torch.int32 if name in INTEGERS else torch.float64)
    found = "int32" if name in INTEGERS else "float64"
    named = "k" if operator.startswith("attend_within") and name == "q" else name  # torch's kernel has float64, too
    found = "float32" if named != name else found
    with pytest.raises(TypeError, match=rf"^{named} is torch.{found}, and .*torch.* is needed"):
        call(operator, operands)


@pytest.mark.parametrize(("operator", "name"), [operand for operand in OPERANDS if operand[1] not in FIRST])
def test_an_operand_of_another_shape_is_named(operator: str, name: str) -> None:
    operands = right_operands()[operator]
    operands[name] = torch.cat([operands[name]] * 3, dim=-1)
    named = "key_sums" if operator == "attend_sums" and name == "k" else name
    with pytest.raises(ValueError, match=rf"^{named} has shape .*, and .* is needed"):
        call(operator, operands)


@pytest.mark.parametrize(("operator", "name"), [operand for operand in OPERANDS if operand[1] not in FIRST])
def test_an_operand_on_another_device_is_named(operator: str, name: str) -> None:
    """One without memory: of other devices torch itself says that they have no such operator."""
    operands = right_operands()[operator]
    operands[name] = operands[name].to("meta")
    named, where = (
        ("key_sums", "cpu, and meta") if operator == "attend_sums" and name == "k" else (name, "meta, and cpu")
    )
    with pytest.raises(ValueError, match=f"^{named} is on {where} is needed"):
        call(operator, operands)


@pytest.mark.parametrize(
    ("operator", "name", "wrong"),
    [
        ("rms_norm", "x", torch.ones(())),
        ("rotate", "x", torch.ones(3, WIDTH)),
        ("rotate", "x", torch.ones(2, 3, 1, 1, 7)),
        ("cross_entropy_sums", "logits", torch.ones(WIDTH, 3).t()),
        ("cross_entropy_sums", "logits", torch.ones(WIDTH)),
    ],
)
def test_first_operands_have_a_form(operator: str, name: str, wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=f"^{name} .* needed"):
        call(operator, right_operands()[operator] | {name: wrong})


@pytest.mark.parametrize("operator", ["attend", "attend_within_documents"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"q": rows(2, 3, 3, WIDTH)}, "k has shape .* heads of which 3 is a multiple"),
        ({"k": rows(2, 0, 5, WIDTH), "v": rows(2, 0, 5, WIDTH)}, "k has shape"),
        ({"spans": [1, 2, 3, 6]}, "spans are"),
        ({"spans": [3, 5, 1, 2]}, "spans are"),
        ({"spans": [-1, 0, 3, 5]}, "spans are"),
        ({"spans": [2, 5, 5]}, "spans are"),
        ({"spans": [0, 5]}, "spans are .* 3 ascending"),
        ({"window": -1}, "spans are"),
    ],
)
def test_ranges_of_keys_are_within_the_keys(operator: str, wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(OPERATORS, operator)(**right_operands()[operator] | RANGES | wrong)


@pytest.mark.parametrize("offset", [-1, 4, 1 << 32])
def test_a_document_begins_in_its_row_before_its_queries(offset: int) -> None:
    operands = right_operands()["attend"]
    operands["first"][1, 1] = offset
    with pytest.raises(ValueError, match=r"^first has an offset before its row or behind its query"):
        call("attend", operands)


def test_operands_of_any_form_are_computed_or_refused() -> None:
    """Random dtypes, shapes and strides: those with the right shape and dtype give the bits of contiguous ones."""
    choose = random.Random(3)
    refused = 0
    for _ in range(600):
        operator, name = choose.choice(OPERANDS)
        operands = right_operands()[operator]
        right = operands[name]
        wrong = choose.choice(FORMS)(right)
        try:
            found = call(operator, operands | {name: wrong})
        except (TypeError, ValueError, RuntimeError):
            refused += 1
            same = wrong.shape == right.shape and wrong.dtype == right.dtype and wrong.device == right.device
            assert not same or operator in ("swiglu_backward", "cross_entropy_sums", "first_equal") or name == "logits"
            continue
        if wrong.shape == right.shape and wrong.dtype == right.dtype and found is not None:
            fresh = right_operands()[operator] | {name: wrong.contiguous()}
            expected = call(operator, fresh)
            for mine, theirs in zip(tensors(found), tensors(expected), strict=True):
                assert same_bits(mine, theirs), (operator, name)
    assert refused > 200


def tensors(result: object) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


FORMS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x[..., :-1],
    lambda x: x[:-1],
    lambda x: x.unsqueeze(0),
    lambda x: x.flatten(),
    lambda x: x.new_empty(0),
    lambda x: torch.cat([x, x]),
    lambda x: x.to(torch.bfloat16),
    lambda x: x.to(torch.int64),
    lambda x: x.to("meta"),
    lambda x: x.transpose(0, -1),
    lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),  # the right values, stored in another order
    lambda x: torch.stack([x, x], dim=-1)[..., 0],  # with gaps in rows
    lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],  # with gaps between rows
    lambda x: x[:1].expand(x.shape),  # every row is the first one
)


def test_gradients_are_written_into_rows() -> None:
    operands = right_operands()["swiglu_backward"]
    operands["by_up"] = torch.ones(WIDTH, 3).t()
    with pytest.raises(ValueError, match="by_gate and by_up have strides"):
        call("swiglu_backward", operands)


def test_the_loss_of_no_columns_is_that_of_an_empty_shard() -> None:
    """The largest of no numbers is -infinity, and their sum 0: other processes have the label and the rest."""
    peak, total, label = OPERATORS.cross_entropy_sums(torch.empty(5, 0), torch.arange(5))
    assert torch.equal(peak, torch.full((5,), -torch.inf))
    assert not total.any() and not label.any()


def assert_as_in_torch(function: Callable[..., torch.Tensor], operands: Results, operator_used: bool = False) -> None:
    """The plain formulas compute, with the same bits, or the kernels the same within a few roundings."""
    found = output_and_gradients(function, operands)
    with torch_only():
        expected = output_and_gradients(function, operands)
    for mine, theirs in zip(found, expected, strict=True):
        if operator_used:
            torch.testing.assert_close(mine, theirs)
        else:
            assert same_bits(mine, theirs)


@pytest.mark.parametrize(
    ("gate", "up"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.float64)]
)
def test_gate_and_up_may_have_two_dtypes(gate: torch.dtype, up: torch.dtype) -> None:
    assert_as_in_torch(gated, [rows(3, WIDTH, dtype=gate), rows(3, WIDTH, dtype=up)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("which", [0, 1])
def test_tables_of_angles_may_have_any_dtype(which: int, dtype: torch.dtype) -> None:
    tables = [rows(3, 1, 1, WIDTH // 2), rows(3, 1, 1, WIDTH // 2)]
    tables[which] = tables[which].to(dtype)
    assert_as_in_torch(lambda x: rotate(x, *tables), [rows(2, 3, 1, 1, WIDTH)])


def test_one_angle_for_all_pairs() -> None:
    tables = [rows(3, 1, 1, 1).expand(3, 1, 1, WIDTH // 2) for _ in range(2)]
    assert_as_in_torch(lambda x: rotate(x, *tables), [rows(2, 3, 1, 1, WIDTH)], operator_used=True)


def test_the_weight_of_a_norm_may_have_any_dtype() -> None:
    x, weight = rows(3, WIDTH), rows(WIDTH, dtype=torch.bfloat16)
    assert_as_in_torch(lambda x, weight: rms_norm(x, weight, 1e-5), [x, weight], operator_used=True)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
def test_gate_and_up_may_be_stored_in_any_order(order: tuple[int, int, int]) -> None:
    """Dense tensors with permuted strides, which ``torch.empty_like`` would keep."""
    back = [order.index(dimension) for dimension in range(3)]
    stored = rows(*((5, 2, WIDTH)[dimension] for dimension in order))
    assert stored.permute(back).shape == (5, 2, WIDTH)
    leaf = stored.permute(back).requires_grad_()
    (gradient,) = torch.autograd.grad(gated_fused(leaf).sum(), leaf)
    same = stored.permute(back).contiguous().requires_grad_()
    (expected,) = torch.autograd.grad(gated_fused(same).sum(), same)
    assert same_bits(gradient, expected)


def test_labels_may_be_int32() -> None:
    logits, labels = rows(40, WIDTH), torch.arange(40) % WIDTH
    expected = CrossEntropy()(logits.clone(), labels, gradient=True)
    found = CrossEntropy()(logits.clone(), labels.to(torch.int32), gradient=True)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is not None and theirs is not None and same_bits(mine, theirs)
