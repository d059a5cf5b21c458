"""Coordinate check of a transfer rule: how sizes of activations, and their changes, depend on width and depth.

    recipe --recipe_of_size--> the same form with another width or number of layers, at the peak rate from step 1
        --its building and step, one batch again and again--> for each quantity
            size     root mean square before the first step
            change   root mean square of the difference from then, divided by the size; mean logarithm over the steps
    models of one axis --> slope d log(size or change) / d log(width or layers) --> stays, grows or shrinks

Yang and Hu 2022 (arXiv 2203.03466), appendix D.1, for widths; Dey et al. 2025 (arXiv 2505.01618), section 4, for
depths. Where ``optimizer.transfer`` has a rule for an axis, all slopes are expected to be 0, but

    size of the logits                  -1/2 over widths: the multiplier 1/m, times the root of m of a random sum; up
                                        to 0 for a tied head, which finds the embedding of the token in the stream
    size of the stream after blocks     0 to -1/2 over depths: random parts of size 1/l add up as the root of l, and the
                                        embedding, whose size stays, is the rest
    first block, size and change        0 to -1 over depths: one block adds 1/l

Changes of logits are those of the labels', and not divided: the size before the first step is an accident that falls
with the width, and learning moves the logits of labels the same way in every model.

Without a rule, or with a wrong row in its table, slopes are off by 1/2 or 1: a sum over n inputs grows as n where
updates agree, and as the root of n where values are random. ``BOUND`` is half of the smaller.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from hlat.config import Recipe, parse_recipe
from hlat.data import Batch
from hlat.ladder.shapes import first_layers
from hlat.model import Decoder
from hlat.optim import build_optimizer
from hlat.parallel import build_parallel
from hlat.runtime.distributed.join import Runtime
from hlat.runtime.terminal import listed, wrapped
from hlat.training import accumulate_gradients, update

WIDTHS, DEPTHS, STEPS = (64, 128, 256, 512, 1024), (2, 4, 8, 16, 32), 5
BOUND = 0.25
"""How far a slope may be from what is expected."""
# Few tokens: the theory is about widths above their number, whose updates agree. No rule depends on the vocabulary.
_SEQUENCES, _LENGTH, _VOCABULARY = 2, 16, 1024
WIDTH, DEPTH = "width", "depth"
EMBEDDING, FIRST, MIDDLE, LAST = "embedding", "first block", "half of the blocks", "last block"
SCORES, HIDDEN, LOGITS = "attention logits", "feed-forward hidden", "logits"
_FALLING = {(WIDTH, LOGITS), (DEPTH, MIDDLE), (DEPTH, LAST)}
"""Sizes that may fall by the root of a right rule."""


@dataclass(frozen=True)
class CoordinateRow:
    """Size or change of one quantity in models that differ in width or depth."""

    axis: str  # width or depth
    quantity: str
    is_change: bool
    values: tuple[float, ...]  # of each width or depth
    slope: float  # of their logarithms
    has_rule: bool  # optimizer.transfer scales with this axis

    @property
    def expected(self) -> tuple[float, float]:
        """Lowest and highest slope under a right rule, as the head of this file has them."""
        if self.axis == DEPTH and self.quantity == FIRST:
            return -1.0, 0.0
        falls = not self.is_change and (self.axis, self.quantity) in _FALLING
        return -0.5 if falls else 0.0, 0.0

    @property
    def verdict(self) -> str:
        """Stays, grows or shrinks: beyond what is expected, and the bound."""
        low, high = self.expected
        if self.slope > high + BOUND:
            return "grows"
        return "stays" if self.slope >= low - BOUND else "shrinks"


@dataclass(frozen=True)
class CoordinateTable:
    """Sizes and changes of all quantities over both axes."""

    name: str  # of the run
    learning_rate: float
    steps: int
    axes: dict[str, tuple[int, ...]]  # widths and depths; while one varies, the other is the smallest
    rows: tuple[CoordinateRow, ...]

    @property
    def broken(self) -> list[CoordinateRow]:
        """Rows that do not stay although the recipe has a rule for their axis."""
        return [row for row in self.rows if row.has_rule and row.verdict != "stays"]


def coordinate_table(
    recipe: Recipe, widths: Sequence[int] = WIDTHS, depths: Sequence[int] = DEPTHS, steps: int = STEPS
) -> CoordinateTable:
    """Train small models of a recipe's form for some steps, on this process's CPU in fp32, and compare them.

    Args:
        recipe: gives model, optimizer with its transfer rule, and seed; its data, schedule and layout are not used.
        widths: of the models with the smallest depth; at least two.
        depths: layers of the models with the smallest width; at least two.
        steps: optimizer steps of each.

    Raises:
        RecipeError: no model of this form has such a size.
    """
    model, growth = recipe.model, recipe.optimizer.growth
    here = growth(model.hidden_size, model.layers, model.n_head_dim)
    has_rule = {
        WIDTH: growth(2 * model.hidden_size, model.layers, model.n_head_dim) != here,
        DEPTH: growth(model.hidden_size, 2 * model.layers, model.n_head_dim) != here,
    }
    axes = {WIDTH: tuple(sorted(widths)), DEPTH: tuple(sorted(depths))}
    shapes = {
        WIDTH: [(width, axes[DEPTH][0]) for width in axes[WIDTH]],
        DEPTH: [(axes[WIDTH][0], depth) for depth in axes[DEPTH]],
    }
    # All recipes first: a wrong size is said before anything is trained. The smallest model is on both axes.
    recipes = {shape: recipe_of_size(recipe, *shape, axes[WIDTH][0]) for each in shapes.values() for shape in each}
    measured = {shape: measure(each, steps) for shape, each in recipes.items()}
    rows = []
    for axis, each in shapes.items():
        for is_change in (False, True):
            for quantity in measured[each[0]][is_change]:
                values = tuple(measured[shape][is_change][quantity] for shape in each)
                line = statistics.linear_regression([*map(math.log, axes[axis])], [*map(_log, values)])
                rows.append(CoordinateRow(axis, quantity, is_change, values, line.slope, has_rule[axis]))
    return CoordinateTable(recipe.run.name, recipe.optimizer.lr, steps, axes, tuple(rows))


def recipe_of_size(recipe: Recipe, width: int, layers: int, narrowest: int) -> Recipe:
    """Return a recipe of the same form for a model of another size, in one process at a constant rate.

    Heads are as wide in all models, and narrower than the recipe's if the narrowest model has no room for one group.
    """
    model = recipe.model
    growth, group = width / model.hidden_size, model.heads // (model.kv_heads or model.heads)
    queries = model.heads * model.n_head_dim / model.hidden_size  # rows per unit of width
    head = 2 ** int(math.log2(max(2.0, min(model.n_head_dim, narrowest * queries / group))))
    kv_heads = max(1, round(width * queries / head / group))
    sizes = {
        "hidden_size": width,
        "layers": layers,
        "intermediate_size": max(8, 8 * round(model.intermediate_size * growth / 8)),
        "heads": kv_heads * group,
        "kv_heads": kv_heads,
        "head_dim": head,
        "vocab_size": min(model.vocab_size, _VOCABULARY),
    }
    section = model.model_dump(mode="json", exclude={"preset", "hf_config"}) | sizes | first_layers(model, layers)
    return parse_recipe(
        {
            "model": section,
            "data": {"path": "unused", "sequence_length": _LENGTH, "tokenizer": {"train": "char"}},
            "batch": {"global_batch": _SEQUENCES, "micro_batch": 1},
            "optimizer": recipe.optimizer.model_dump(mode="json"),
            "schedule": {"kind": "constant"},
            "training": {"steps": 1, "seed": recipe.training.seed},
            "precision": {"mode": "fp32"},
        }
    )


def random_batch(recipe: Recipe) -> Batch:
    """Return random tokens: they need no prepared data, and updates agree on any batch that is repeated."""
    generator = torch.Generator().manual_seed(recipe.training.seed)
    tokens = torch.randint(recipe.model.vocab_size, (_SEQUENCES, _LENGTH + 1), generator=generator)
    return Batch(tokens[:, :-1], tokens[:, 1:], np.arange(_SEQUENCES))


def measure(recipe: Recipe, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Train a model for some steps; return size and change of each quantity."""
    model = build_parallel(recipe, Runtime(torch.device("cpu")), recipe.training.seed)
    optimizer = build_optimizer(
        model.local_parameters, recipe.optimizer, recipe.precision.mode, recipe.training.seed, model.matrices
    )
    batch, (decoder,) = random_batch(recipe), model.stages
    before = observe(decoder, batch)
    after = []
    for step in range(1, steps + 1):
        update(model, optimizer, recipe, step, accumulate_gradients(model, batch))
        after.append(observe(decoder, batch))
    return {name: rms(each) for name, each in before.items()}, changes(before, after, batch)


def changes(
    before: dict[str, torch.Tensor], after: Sequence[dict[str, torch.Tensor]], batch: Batch
) -> dict[str, float]:
    """Compute the change of each quantity, given its values before the first step and after each."""
    found = {}
    for name, begin in before.items():
        differences = [each[name] - begin for each in after]
        size = rms(begin)
        if name == LOGITS:
            labels_BS1 = batch.labels_BS[..., None]
            differences, size = [each.gather(-1, labels_BS1) for each in differences], 1.0
        found[name] = math.exp(statistics.mean(_log(rms(each) / size) for each in differences))
    return found


def rms(values: torch.Tensor) -> float:
    """Compute the root mean square of all elements."""
    return float(values.double().square().mean().sqrt())


def _log(value: float) -> float:
    return math.log(max(value, 1e-30))  # what never changes has a slope of zero


@torch.no_grad()
def observe(decoder: Decoder, batch: Batch) -> dict[str, torch.Tensor]:
    """Compute all quantities of a complete decoder by name, in the order of the forward pass."""
    found = dict.fromkeys((EMBEDDING, FIRST, MIDDLE, SCORES, HIDDEN, LAST, LOGITS), torch.empty(0))
    blocks = list(decoder.blocks())
    # It reads what exactly half of the blocks have added, whatever their number.
    middle = blocks[len(blocks) // 2]
    core = middle.attention.core

    def attend(q_BHSE: torch.Tensor, k_BGSE: torch.Tensor, *others: Any) -> torch.Tensor:
        k_BHSE = k_BGSE.repeat_interleave(q_BHSE.shape[1] // k_BGSE.shape[1], dim=1)
        found[SCORES] = q_BHSE @ k_BHSE.mT / math.sqrt(q_BHSE.shape[-1])
        return core(q_BHSE, k_BGSE, *others)

    def keep(name: str, module: Any, inputs: Any, output: torch.Tensor) -> None:
        found[name] = output

    def keep_input(name: str, module: Any, inputs: Any) -> None:
        found[name] = inputs[0]

    hooks = [
        # Not the embedding's output: some architectures multiply it.
        blocks[0].register_forward_pre_hook(partial(keep_input, EMBEDDING)),
        blocks[0].register_forward_hook(partial(keep, FIRST)),
        middle.register_forward_pre_hook(partial(keep_input, MIDDLE)),
        middle.feed_forward.down.register_forward_pre_hook(partial(keep_input, HIDDEN)),
        blocks[-1].register_forward_hook(partial(keep, LAST)),
    ]
    middle.attention.core = attend
    try:
        found[LOGITS] = decoder(batch.inputs_BS)
    finally:
        middle.attention.core = core
        for hook in hooks:
            hook.remove()
    return found


def coordinate_lines(table: CoordinateTable) -> Iterator[str]:
    """Yield the lines of a table, 80 columns at most: size and change at both ends of each axis."""
    yield f"{table.name}: lr {table.learning_rate:g}, {table.steps} steps on one batch of random tokens"
    fixed = {WIDTH: f"{table.axes[DEPTH][0]:,} layers", DEPTH: f"width {table.axes[WIDTH][0]:,}"}
    for axis, sizes in table.axes.items():
        rows = [row for row in table.rows if row.axis == axis]
        yield ""
        yield f"{axis} {', '.join(f'{size:,}' for size in sizes)}; {fixed[axis]}"
        ends = f"{sizes[0]:>7,} {sizes[-1]:>7,} slope"
        yield f"{'size and change at':19} {ends} {'':7} {ends}"
        change_of = {row.quantity: row for row in rows if row.is_change}
        for row in rows:
            if not row.is_change:
                yield f"{row.quantity:19} {_cells(row)} {_cells(change_of[row.quantity])}".rstrip()
        if not rows[0].has_rule:
            yield f"The recipe has no rule for {axis}: optimizer.transfer."
    if any(row.has_rule for row in table.rows):
        names = listed([f"{row.quantity} ({row.axis})" for row in table.broken], 3)
        yield ""
        yield from wrapped(
            f"Not as the rule promises: {names}." if names else "All that the recipe's rule is about stays.", 80, 2
        )


def _cells(row: CoordinateRow) -> str:
    return f"{row.values[0]:7.2g} {row.values[-1]:7.2g} {row.slope:+5.2f} {row.verdict:7}"


def coordinates_json(table: CoordinateTable) -> dict[str, Any]:
    """Return a table as JSON values."""
    rows = [asdict(row) | {"verdict": row.verdict} for row in table.rows]
    holds = not table.broken if any(row.has_rule for row in table.rows) else None  # there is nothing to hold
    return {**asdict(table), "bound": BOUND, "rows": rows, "holds": holds}
