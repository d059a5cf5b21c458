"""The model that a budget can train: its size and its tokens, as a shape that the planner plans.

    budget or FLOPs --scaling law--> parameters, tokens --nearest shape--> model --planner--> FLOPs that the budget buys
                                          ^------------------------------------------------------'  until they agree

What a dollar buys depends on the model, so law and planner are asked in turn. The tokens are then those that the budget
affords for the chosen shape.
"""

from collections.abc import Callable
from dataclasses import dataclass

from hlat.hardware import Catalog, Cluster, PriceKind
from hlat.model.derived import count_parameters
from hlat.planner.problem import PlanRequest, nearest_shape
from hlat.planner.purchase.afford import afford, affordable
from hlat.planner.purchase.choice import choose_cluster
from hlat.planner.purchase.goal import Goal
from hlat.planner.purchase.offers import Kind, Offer
from hlat.planner.purchase.scaling_law import CHINCHILLA, FLOPS_PER_PARAMETER
from hlat.runtime import PlanError

_FIRST_FLOPS = 1e21  # of the model that the budget is first asked for; the answer does not depend on it
_ROUNDS = 6

RequestOf = Callable[[str, int | None], Callable[[Cluster, PriceKind | None], PlanRequest]]
"""The requests of a model with so many tokens (None for any), by cluster and kind of price."""


@dataclass(frozen=True)
class SizedRun:
    """A model of a size, trained on so many tokens.

    Attributes:
        purpose: what its size is best for.
        parameters: its parameters.
        best: parameters and tokens that the law wants; the shape is the nearest one.
        offer: its run.
    """

    purpose: str
    parameters: int
    best: tuple[float, float]
    offer: Offer

    @property
    def tokens(self) -> int:
        """Training tokens."""
        return self.offer.request.tokens

    @property
    def loss(self) -> float:
        """Loss by the law, in nats per token."""
        return CHINCHILLA.loss(self.parameters, self.tokens)

    @property
    def flops(self) -> float:
        """FLOPs of the training as the law counts them."""
        return FLOPS_PER_PARAMETER * self.parameters * self.tokens

    def lifetime_flops(self, generated: float) -> float:
        """FLOPs of the training and of generating so many tokens."""
        return self.flops + FLOPS_PER_PARAMETER / 3 * self.parameters * generated


@dataclass(frozen=True)
class ModelSize:
    """Answer to the question which model to train.

    Attributes:
        goal: limits of the run.
        flops: FLOPs of the training, if they were given instead of a budget.
        generated: tokens to be generated over the model's life; 0 if nothing was said.
        price: kind of all prices.
        runs: the run with the least loss; with tokens to be generated, the one that is best for them first.
        missed: reason, by kind of instance without an offer.
    """

    goal: Goal
    flops: float | None
    generated: float
    price: PriceKind | None
    runs: tuple[SizedRun, ...]
    missed: dict[str, str]


def choose_model_size(
    chips: str,
    goal: Goal,
    request_of: RequestOf,
    catalog: Catalog,
    price: PriceKind | None = None,
    *,
    flops: float | None = None,
    generated: float = 0.0,
) -> ModelSize:
    """Choose the size of a model, its tokens and its cluster.

    Args:
        chips: instances or chips of the catalog, separated by commas, or ``any``.
        goal: limits of the run; without ``flops``, a budget is one of them.
        request_of: the requests of a model.
        catalog: chips, instances and prices.
        price: kind of price; None for the one that most of the instances have.
        flops: FLOPs of the training, instead of what the budget buys.
        generated: tokens to be generated over the model's life, prompts included.

    Raises:
        HardwareError: an unknown instance or chip; names all of them.
        PlanError: no price is known, or nothing fits.
    """
    purposes = [("least loss", 0.0)]
    if generated:
        purposes.insert(0, (f"{_short(generated)} generated", generated))
    if flops is not None:
        return _for_flops(chips, goal, request_of, catalog, price, flops, generated, purposes)
    name, _, size = nearest_shape(CHINCHILLA.optimal_size(_FIRST_FLOPS)[0])
    first = afford(chips, goal, request_of(name, None), catalog, price)
    chosen = first.chosen
    runs = []
    for purpose, tokens in purposes:
        runs.append(_agreed(goal, first.price, request_of, purpose, tokens, chosen, size))
        chosen, size = runs[-1].offer, runs[-1].parameters
    return ModelSize(goal, None, generated, first.price, tuple(runs), first.missed)


def _agreed(
    goal: Goal, price: PriceKind | None, request_of: RequestOf, purpose: str, generated: float, offer: Offer, size: int
) -> SizedRun:
    """Return the run of the size at which law and planner agree, on the kind of instance of another run."""
    cluster, known = offer.cluster, {size: offer}
    for _ in range(_ROUNDS):
        best = CHINCHILLA.optimal_size(FLOPS_PER_PARAMETER * size * known[size].request.tokens, generated)
        name, _, wanted = nearest_shape(best[0])
        if wanted in known:
            return SizedRun(purpose, wanted, best, known[wanted])
        of_model = request_of(name, None)
        kind = Kind(cluster.instance, cluster.chip, lambda one, ask=of_model: ask(one, price))  # type: ignore[misc]
        numbers = [cluster.count << power for power in range(8)] + [cluster.count >> power for power in range(1, 8)]
        found = next((one for one in map(kind.at, filter(None, numbers)) if one is not None), None)
        if found is None:
            raise PlanError(f"{name} fits on no number of {cluster.instance.name}, {goal}")
        size = wanted
        known[size] = affordable(goal, found)
    return SizedRun(purpose, size, best, known[size])


def _for_flops(
    chips: str,
    goal: Goal,
    request_of: RequestOf,
    catalog: Catalog,
    price: PriceKind | None,
    flops: float,
    generated: float,
    purposes: list[tuple[str, float]],
) -> ModelSize:
    """Return the runs for an amount of compute: their sizes are known before anything is planned."""
    runs, missed = [], {}
    of = price
    for purpose, tokens in purposes:
        best = CHINCHILLA.optimal_size(flops, tokens)
        name, _, size = nearest_shape(best[0])
        found = choose_cluster(
            chips, goal, request_of(name, max(1, round(flops / FLOPS_PER_PARAMETER / size))), catalog, price
        )
        of, missed = found.price, found.missed
        runs.append(SizedRun(purpose, size, best, found.chosen))
    return ModelSize(goal, flops, generated, of, tuple(runs), missed)


def optimal_tokens(request: PlanRequest) -> tuple[int, float]:
    """Return the parameters of a request's model, and the training tokens for which that size is the best one."""
    size = count_parameters(request.model).total
    low, high = 1e9, 1e32
    while high / low > 1 + 1e-9:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if CHINCHILLA.optimal_size(middle)[0] < size else (low, middle)
    return size, CHINCHILLA.optimal_size(low)[1]


def _short(tokens: float) -> str:
    return f"{tokens / 1e12:.3g}T" if tokens >= 1e12 else f"{tokens / 1e9:.3g}B"
