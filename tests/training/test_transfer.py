"""Transfer against the papers' tables, applied by hand to transformers' models with their multipliers as operations.

The witness stores W, hlat stores W' = a W. Both train in float64 from the same values.
"""

import math
from typing import Any

import pytest
import torch
from torch import nn

from hlat.config import Recipe
from hlat.config.load import parse_recipe
from hlat.model.parameter_layout import canonical_shapes
from hlat.optim import build_optimizer
from hlat.optim.muon import COEFFICIENTS
from hlat.parallel import ParallelModel, build_parallel
from hlat.runtime.distributed.join import Runtime
from hlat.runtime.random_keys import stream_key
from hlat.runtime.randomness import normal_range
from hlat.training import accumulate_gradients, update
from tests.support.distributed.jobs import batch_of
from tests.support.model.canonical import to_canonical
from tests.support.model.families import BASE, FAMILIES, float64_norms, tokens_of, twin

LR, DECAY, EPS, STD, CLIP = 4e-3, 0.2, 1e-4, 0.08, 0.3
STEPS = 20
MUP = {"transfer": "mup", "base_hidden_size": 16}
DEEP = {"transfer": "completep", "base_hidden_size": 16, "base_layers": 2}
Tensors = dict[str, torch.Tensor]


def recipe_of(family: str, optimizer: dict[str, Any], **model: Any) -> Recipe:
    options = {"lr": LR, "weight_decay": DECAY, "eps": EPS, "clip_norm": CLIP}
    return parse_recipe(
        {
            "model": {**BASE, **FAMILIES[family], "init_std": STD, **model},
            "data": {"path": "unused", "sequence_length": 16, "tokenizer": {"train": "char"}},
            "batch": {"global_batch": 4, "micro_batch": 4},
            "training": {"steps": STEPS},
            "schedule": {"kind": "constant"},
            "precision": {"mode": "fp32"},
            "optimizer": {**options, **optimizer},
        }
    )


def train(recipe: Recipe) -> tuple[ParallelModel, Tensors, Tensors, list[float]]:
    """Train; return the model, canonical weights before and after, and the gradient norms."""
    model = build_parallel(recipe, Runtime(torch.device("cpu")), seed=1, dtype=torch.float64)
    optimizer = build_optimizer(model.local_parameters, recipe.optimizer, matrices=model.matrices)
    before, norms = canonical(model), []
    for step in range(1, STEPS + 1):
        loss = accumulate_gradients(model, batch_of(model, recipe, step))
        norms.append(float(update(model, optimizer, recipe, step, loss).gradient_norm))
    return model, before, canonical(model), norms


def canonical(model: ParallelModel) -> Tensors:
    (stage,) = model.stages
    return to_canonical(stage.config, {name: each.detach().clone() for name, each in stage.named_parameters()})


class Witness:
    """The rows of the papers' tables for a tensor of transformers, by its name."""

    def __init__(self, recipe: Recipe) -> None:
        optimizer, model = recipe.optimizer, recipe.model
        self.m = model.hidden_size / optimizer.base_hidden_size
        self.l = model.layers / (optimizer.base_layers or model.layers)
        self.base_layers = optimizer.base_layers or model.layers
        self.scaling = math.sqrt(optimizer.base_head_dim or model.n_head_dim) / model.n_head_dim
        self.c = math.sqrt(self.scaling * math.sqrt(model.n_head_dim))
        self.is_muon, self.recipe = optimizer.kind == "muon", recipe
        self.norms_after = model.architecture == "olmo2"
        self.head_norms = self.norms_after or model.qk_norm
        self.tied = model.tie_embeddings

    def is_hidden(self, name: str) -> bool:
        return name.endswith("_proj.weight")

    def multiplier(self, name: str) -> float:
        if name == ("model.norm.weight" if self.tied else "lm_head.weight"):
            return 1 / self.m
        added = (
            ("post_attention_layernorm", "post_feedforward_layernorm") if self.norms_after else ("o_proj", "down_proj")
        )
        found = 1 / self.l if any(each in name for each in added) else 1.0
        if self.head_norms:
            return found * (self.c if "q_norm" in name or "k_norm" in name else 1.0)
        if "o_proj" in name:
            return found / self.c
        return found * (self.c if any(f"{each}_proj" in name for each in "qkv") else 1.0)

    def std(self, name: str) -> float:
        std = STD / math.sqrt(self.m) if self.is_hidden(name) else STD
        is_smaller = self.recipe.model.init_scaled_outputs and ("o_proj" in name or "down_proj" in name)
        return std / math.sqrt(2 * self.base_layers) if is_smaller else std

    def group(self, name: str) -> dict[str, float]:
        hidden = self.is_hidden(name)
        decay = DECAY * (self.m if hidden else 1) if self.is_matrix(name) else 0.0
        depth = self.l if ".layers." in name else 1
        return {"lr": LR / self.m if hidden else LR, "weight_decay": decay, "eps": EPS / self.m / depth}

    def is_matrix(self, name: str) -> bool:
        return self.is_hidden(name) or name in ("model.embed_tokens.weight", "lm_head.weight")

    def attach(self, model: nn.Module) -> None:
        """Put the multipliers into the forward pass."""

        def by_depth(_: nn.Module, __: Any, out: Any) -> Any:
            return (out[0] / self.l, *out[1:]) if isinstance(out, tuple) else out / self.l

        for layer in model.model.layers:
            layer.self_attn.scaling = self.scaling
            halves = (layer.self_attn, layer.mlp)
            if self.norms_after:
                halves = (layer.post_attention_layernorm, layer.post_feedforward_layernorm)
            for half in halves:
                half.register_forward_hook(by_depth)
        model.model.embed_tokens.padding_idx = None  # a row that OLMo 2's class would not train
        model.lm_head.register_forward_hook(lambda _, __, out: out / self.m)


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    a, b, c = COEFFICIENTS
    x = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def train_witness(witness: Witness, theirs: nn.Module, ours: ParallelModel) -> list[float]:
    """The plain loop: torch's AdamW, or Muon written down."""
    named = dict(theirs.named_parameters())
    momenta = {
        name: torch.zeros_like(each) for name, each in named.items() if witness.is_muon and witness.is_hidden(name)
    }
    rest = [{"params": [each], **witness.group(name)} for name, each in named.items() if name not in momenta]
    optimizer, norms = torch.optim.AdamW(rest, betas=(0.9, 0.95)), []
    for step in range(1, STEPS + 1):
        batch = batch_of(ours, witness.recipe, step)
        logits = theirs(batch.inputs_BS).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels_BS.flatten()).backward()
        norms.append(float(nn.utils.clip_grad_norm_(theirs.parameters(), CLIP)))
        optimizer.step()
        with torch.no_grad():
            for name, momentum in momenta.items():
                weight, gradient = named[name], named[name].grad
                momentum.lerp_(gradient, 0.05)
                update_ = newton_schulz(gradient.lerp(momentum, 0.95)) * 0.2 * math.sqrt(max(weight.shape))
                rate = LR / math.sqrt(witness.m)
                weight.mul_(1 - rate * DECAY * math.sqrt(witness.m)).sub_(update_ * rate)
        theirs.zero_grad()
    return norms


@pytest.mark.parametrize(
    ("family", "optimizer", "model"),
    [
        pytest.param("llama31-gqa", DEEP, {}, id="completep"),
        pytest.param("llama31-gqa", MUP, {"init_scaled_outputs": False}, id="mup"),
        pytest.param("llama31-gqa", DEEP | {"base_head_dim": 8}, {"coalesce": False}, id="wider heads, not coalesced"),
        pytest.param("tied", DEEP, {}, id="tied"),
        pytest.param("qwen2-bias", DEEP | {"base_head_dim": 4}, {}, id="biases, wider heads"),
        pytest.param("qwen3-norm", DEEP | {"base_head_dim": 4}, {}, id="norms of heads, wider heads"),
        pytest.param("olmo2-gqa", DEEP | {"base_head_dim": 4}, {}, id="norms after, wider heads"),
        pytest.param("llama31-gqa", DEEP | {"kind": "muon"}, {}, id="muon"),
        pytest.param("olmo2-gqa", MUP | {"kind": "muon", "base_head_dim": 4}, {}, id="muon, norms after, wider heads"),
    ],
)
def test_a_plain_loop_with_the_table_of_the_paper_trains_the_same_weights(
    family: str, optimizer: dict[str, Any], model: dict[str, Any]
) -> None:
    recipe = recipe_of(family, optimizer, **model)
    witness = Witness(recipe)
    ours, before, after, norms = train(recipe)
    for name, shape in canonical_shapes(recipe.model).items():
        if witness.is_matrix(name):
            values = normal_range(stream_key(1, "init", name), 0, math.prod(shape)).view(shape).double()
            expected = values * witness.std(name)
            torch.testing.assert_close(before[name] / witness.multiplier(name), expected, rtol=2**-21, atol=0)
    theirs = twin(ours.stages[0], torch.float64)
    theirs.load_state_dict({name: each / witness.multiplier(name) for name, each in before.items()}, strict=False)
    witness.attach(theirs)
    with float64_norms(theirs):
        expected_norms = train_witness(witness, theirs.train(), ours)
        exported = twin(ours.stages[0], torch.float64)
        exported.load_state_dict(after, strict=False)
        tokens = tokens_of(recipe.model)
        with torch.no_grad():
            torch.testing.assert_close(exported(tokens).logits, theirs(tokens).logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-10, atol=0)
    named = dict(theirs.named_parameters())
    for name, each in after.items():
        assert (each / witness.multiplier(name) - named[name]).abs().max() < 1e-10, name
