"""The model that a budget can train: its size and its tokens, as a shape that the planner plans.

    budget or FLOPs --scaling law--> parameters, tokens --nearest shape--> model --planner--> FLOPs that the budget buys
                                          ^------------------------------------------------------'  until they agree

What a dollar buys depends on the model, and so does the best cluster for it: law and planner are asked in turn, and
the planner chooses kind and number of instances anew for each size. The tokens are those that the budget affords there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import log

from hlat.hardware import Catalog, Cluster, PriceKind
from hlat.model import count_parameters
from hlat.planner.problem.llama_class import nearest_shape
from hlat.planner.problem.request import PlanRequest
from hlat.planner.purchase.afford import afford
from hlat.planner.purchase.choice import Purchase, choose_cluster
from hlat.planner.purchase.goal import Goal
from hlat.planner.purchase.offers import Offer
from hlat.planner.purchase.scaling_law import CHINCHILLA, FLOPS_PER_PARAMETER
from hlat.runtime.quantities.formatting import short_count

_FIRST_FLOPS = 1e21  # of the model that is asked for first; every later one gets a cluster of its own
_MOST_SIZES = 10  # that are asked for; three are usual

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
        purposes.insert(0, (f"{short_count(generated)} generated", generated))
    if flops is not None:
        return _for_flops(chips, goal, request_of, catalog, price, flops, generated, purposes)
    purchases: dict[str, Purchase] = {}

    def purchase_of(name: str) -> Purchase:
        if name not in purchases:
            purchases[name] = afford(chips, goal, request_of(name, None), catalog, price)
        return purchases[name]

    begin, runs = CHINCHILLA.optimal_size(_FIRST_FLOPS)[0], []
    for purpose, tokens in purposes:
        runs.append(_agreed(purchase_of, begin, purpose, tokens))
        begin = runs[-1].parameters
    first = purchases[runs[0].offer.request.name]
    return ModelSize(goal, None, generated, first.price, tuple(runs), first.missed)


def _agreed(purchase_of: Callable[[str], Purchase], begin: float, purpose: str, generated: float) -> SizedRun:
    """Return the run of the size that the law wants for the compute which the budget buys for that very size.

    Each size gets the kind and number of instances that are best for it. Shapes are a few percent apart, and one may be
    trained more efficiently than the next: if the law goes round among some, the answer is the one nearest to what it
    wants for it.

    Args:
        purchase_of: the cluster to buy for a model, and the tokens that the budget affords there.
        begin: parameters of the first model that is asked for.
        purpose: what the size is best for.
        generated: tokens to be generated over the model's life.
    """
    tried: dict[int, SizedRun] = {}
    name, _, size = nearest_shape(begin)
    while size not in tried and len(tried) < _MOST_SIZES:
        offer = purchase_of(name).chosen
        best = CHINCHILLA.optimal_size(FLOPS_PER_PARAMETER * size * offer.request.tokens, generated)
        tried[size] = SizedRun(purpose, size, best, offer)
        name, _, size = nearest_shape(best[0])
    order = list(tried)
    around = order[order.index(size) :] if size in tried else order
    return min((tried[one] for one in around), key=lambda run: abs(log(run.best[0] / run.parameters)))


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
