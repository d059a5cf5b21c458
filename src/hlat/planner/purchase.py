"""Purchases: a cluster for a run, the tokens that a budget affords, or the model that it can train.

    model, kinds of instances, goal --choose_cluster--> Purchase: the best run of each kind, and sizes of the chosen one
    model without tokens, budget --choose_cluster--> Purchase: the run of each kind with most tokens
    budget or FLOPs --choose_model_size--> ModelSize: a model, its tokens and its run

        budget --scaling law--> parameters, tokens --nearest shape--> model --planner--> FLOPs that the budget buys
                     ^-----------------------------------------------------------------'  until they agree

The best cluster depends on the model, and so does what a dollar buys. So law and planner are asked in turn: the planner
chooses kind and number of instances anew for each size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import ceil, floor, log, log10

from hlat.config import ModelConfig
from hlat.hardware import Catalog, Chip, Cluster, Instance, PriceKind, close_names, no_price
from hlat.model import count_parameters
from hlat.planner.offers import Goal, Kind, Offer, compute, explore, parse_goal, without_refusals
from hlat.planner.problem.devices import why_not_runnable
from hlat.planner.problem.loss_law import WIDEST_SIZES, BestSize, LossLaw, PlannedLoss, SizeRange
from hlat.planner.problem.question import PlanQuestion
from hlat.planner.problem.request import PlanRequest, names_tokens, resolve_request
from hlat.planner.problem.shapes import SHAPE_SEQUENCE, nearest_shape
from hlat.runtime.errors import HardwareError, PlanError
from hlat.runtime.quantities import short_count
from hlat.runtime.terminal import TABLE_ROWS, listed

ANY = "any"
"""Text for every kind of instance that has a price."""


@dataclass(frozen=True)
class Purchase:
    """Answer to a buyer: what to rent for a run, and the alternatives."""

    goal: Goal
    price: PriceKind | None
    rows: tuple[Offer, ...]  # the best offer of each kind that meets the goal; the first is the one to take
    sizes: tuple[Offer, ...]  # offers of the chosen kind, by number of instances
    missed: dict[str, str]  # reason by kind without an offer
    affords: bool = False  # the number of tokens is what the budget affords; else it was given
    roomy: str | None = None  # earlier deadline with which the run's whole range meets the goal's, as in 5.3d

    @property
    def chosen(self) -> Offer:
        return self.rows[0]

    @property
    def range_goal(self) -> Goal:
        """Limits for the whole range of a prediction: a budget that chose the tokens does not limit their cost."""
        return Goal(self.goal.days, None if self.affords else self.goal.usd)

    @property
    def sure(self) -> tuple[Offer, ...]:
        """Offers that meet the goal with the whole range in which 4 of 5 runs are expected, cheapest first."""
        offers = {offer.cluster.name: offer for offer in (*self.rows, *self.sizes)}.values()
        sure = [offer for offer in offers if self.range_goal.meets(offer.slow_end)]
        # A buyer who chose a chip that hlat cannot run on wants to compare such chips too.
        if _runnable(self.chosen):
            sure = [offer for offer in sure if _runnable(offer)]
        return tuple(sorted(sure, key=lambda offer: (offer.usd or 0.0, offer.days)))


def _runnable(offer: Offer) -> bool:
    return not why_not_runnable(offer.cluster.chip, offer.request.mode)


def choose_cluster(question: PlanQuestion) -> Purchase:
    """Choose kind and number of instances for a run, by a deadline, a budget, both or neither.

    With a budget for a model whose number of tokens nobody says, they are those that train on most tokens.

    Raises:
        HardwareError: an unknown instance or chip; names all of them.
        PlanError: no price is known, or no cluster meets the goal; says how close each kind comes.
    """
    goal = parse_goal(question.deadline, question.budget)
    kinds, of, missed = _kinds_of(question, goal)
    if goal.usd is not None and question.tokens is None and not names_tokens(str(question.model)):
        found = _afford(goal, kinds, of, missed)
        return replace(found, roomy=_roomy(found, kinds))
    best, others = explore(goal, kinds)
    missed |= others
    if not best:
        raise no_offer(f"no cluster meets the goal, {goal}", missed)
    chosen, kind = best[0]
    # Computed for the table of sizes alone: the offers stay in the kind.
    list(kind.doublings(chosen.cluster.count))
    if not goal.meets(chosen.slow_end):
        compute(goal.shrunk(chosen.slow_end.days / chosen.days), kind)  # numbers that leave room for it, if any
    return Purchase(goal, of, tuple(offer for offer, _ in best), tuple(kind.offers), missed)


def no_offer(what: str, missed: dict[str, str]) -> PlanError:
    """Return the error with the reason of each kind; a reason may have several lines."""
    lines = (f"  {names}: {reason}".replace("\n", "\n    ") for names, reason in missed_by_reason(missed))
    return PlanError("\n".join([f"{what}:", *lines]))


def missed_by_reason(missed: dict[str, str]) -> list[tuple[str, str]]:
    """Return the names of the kinds that were left for one reason, and the reason."""
    names: dict[str, list[str]] = {}
    for name, reason in missed.items():
        names.setdefault(reason, []).append(name)
    return [(listed(found, TABLE_ROWS), reason) for reason, found in names.items()]


def _kinds_of(question: PlanQuestion, goal: Goal) -> tuple[list[Kind], PriceKind | None, dict[str, str]]:
    """Find the kinds of instances of a question, the kind of their prices, and reasons by kind that has none.

    PlanError: none has the kind of price that is asked for; or there is a budget, and no price is known.
    """
    catalog, of = question.catalog, question.price_kind()
    found = _instances(question.chips or "", catalog, priced=goal.usd is not None)
    instances = [instance for instance, _ in found]
    of = of or _usual_price(instances)
    known = {instance.name for instance in instances if (of in instance.prices if of else instance.prices)}
    if of is not None and not known:
        raise PlanError(no_price(of, instances))
    if goal.usd is not None and not known:
        names = ", ".join(instance.name for instance in instances)
        raise PlanError(f"--budget: no price is known of {names}; give one, as in --price 2.10/h (of a chip)")
    # Without any price, instance-days are compared.
    known = known or {instance.name for instance in instances}
    reason = f"no {of} price is known" if of else "no price is known"
    missed = {instance.name: reason for instance in instances if instance.name not in known}

    def request(cluster: Cluster) -> PlanRequest:
        return resolve_request(question, cluster, of)

    return [Kind(instance, chip, request) for instance, chip in found if instance.name in known], of, missed


def _instances(chips: str, catalog: Catalog, *, priced: bool) -> list[tuple[Instance, Chip]]:
    """Return the named instances; all instances of a chip for its name. Unknown names raise HardwareError."""
    usable = [
        (instance, chip)
        for instance in catalog.instances
        if (chip := catalog.chip(instance.chip)) is not None and chip.can_be_planned
    ]
    if chips.strip().lower() == ANY:
        # Who brings quotes asks which of them to take.
        quoted = [pair for pair in usable if pair[0].quoted]
        return quoted or [pair for pair in usable if pair[0].prices]
    chosen: list[tuple[Instance, Chip]] = []
    problems, is_close = [], True
    for word in filter(None, (word.strip() for word in chips.split(","))):
        named = catalog.instance(word)
        of_chip = catalog.chip(word)
        found = [pair for pair in usable if pair[0] is named] or [pair for pair in usable if pair[1] is of_chip]
        # An instance without a price stands for all with its chip that have one.
        if priced and found and not any(instance.prices for instance, _ in found):
            found += [(one, chip) for one, chip in usable if chip is found[0][1] and one.prices]
        chosen += [pair for pair in found if pair not in chosen]
        if not found:
            close = close_names(word, [name for one, chip in usable for name in (one.name, chip.name)])
            hint = f"; did you mean {' or '.join(dict.fromkeys(close))}?" if close else ""
            problems.append(f"--chips {word}: the catalog has no such instance or chip{hint}")
            is_close = is_close and bool(close)
    if not chosen and not problems:
        problems, is_close = ["--chips names nothing"], False
    if problems:
        known = "" if is_close else f"Some are {listed(instance.name for instance, _ in usable)}; "
        raise HardwareError("\n".join([*problems, f"{known}`hlat hardware list` shows all; or any: all with a price."]))
    return chosen


def _usual_price(instances: Sequence[Instance]) -> PriceKind | None:
    """Return the kind of price that most instances have; among equals, the first in the catalog.

    With quotes, it is a kind that all have, and None if each has to be taken at a kind of its own.
    """
    if any(instance.quoted for instance in instances):
        return next((kind for kind in instances[0].prices if all(kind in one.prices for one in instances)), None)
    counts: dict[PriceKind, int] = {}
    for instance in instances:
        for kind in instance.prices:
            counts[kind] = counts.get(kind, 0) + 1
    return max(counts, key=counts.__getitem__, default=None)


_DOUBLINGS = 6  # of a number that is too small for the model, and halvings of one too large for its batch


def _afford(goal: Goal, kinds: Sequence[Kind], of: PriceKind | None, missed: dict[str, str]) -> Purchase:
    """Choose kind and number of instances that train on most tokens; the requests' own tokens have no influence."""
    # Per token, a run costs and takes the same with few tokens as with many. So without a deadline the best number of
    # instances is that of a plan without a goal (the bend of the cost), and the budget says how many tokens.
    if goal.days is None:
        found, others = explore(Goal(), kinds)
        missed |= others
        best = [(affordable(goal, offer), kind) for offer, kind in found]
    else:
        possible, others = without_refusals(kinds)
        missed |= others
        best = []
        for kind in possible:
            offers = [affordable(goal, offer) for offer in _for_all_the_time(goal, kind)]
            if offers:
                best.append((max(offers, key=lambda offer: offer.request.tokens), kind))
            else:
                missed[kind.instance.name] = "no layout of the model fits, on as many as the budget pays for"
    if not best:
        raise no_offer(f"no cluster can train the model, {goal}", missed)
    best.sort(key=lambda pair: -pair[0].request.tokens)
    sizes = [affordable(goal, offer) for offer in best[0][1].offers]
    # One object for both tables, which mark the chosen offer by identity.
    chosen = best[0][0]
    sizes = [chosen if offer.cluster == chosen.cluster else offer for offer in sizes]
    return Purchase(goal, of, tuple(offer for offer, _ in best), tuple(sizes), missed, affords=True)


_DEADLINES = 4  # that are tried, each a tenth shorter


def _roomy(found: Purchase, kinds: Sequence[Kind]) -> str | None:
    """Find an earlier deadline whose run meets that of ``found`` over its whole range; None if none is needed."""
    days, chosen = found.goal.days, found.chosen
    if days is None or found.sure:
        return None
    shorter = days * chosen.days / chosen.slow_end.days
    for _ in range(_DEADLINES):
        text = f"{_rounded_down(shorter)}d"
        # Answered as the command with that deadline answers: another number of instances may be the best for it.
        again = _afford(replace(found.goal, days=parse_goal(text, None).days), kinds, found.price, {})
        if found.range_goal.meets(again.chosen.slow_end):
            return text
        shorter *= 0.9
    return None


def _rounded_down(value: float) -> str:
    # Two significant digits. The 1e-9 keeps exact multiples, which division may put just below.
    unit = 10.0 ** (floor(log10(value)) - 1)
    return f"{floor(value / unit + 1e-9) * unit:.12g}"


def affordable(goal: Goal, offer: Offer) -> Offer:
    """Return the run with as many tokens as budget and deadline allow, at least one step."""
    assert goal.usd is not None and offer.usd is not None, "a budget needs prices, which _kinds_of looked for"
    share = goal.usd / offer.usd
    if goal.days is not None:
        share = min(share, goal.days / offer.days)
    return offer.with_tokens(max(int(share * offer.request.tokens), offer.request.tokens_per_step))


def _for_all_the_time(goal: Goal, kind: Kind) -> Sequence[Offer]:
    """Return offers that cost about the budget until the deadline; the nearest possible one where none is."""
    assert goal.days is not None and goal.usd is not None, "there are a deadline and a budget"
    price = kind.cluster(1).price(kind.request_on(kind.cluster(1)).price)
    assert price is not None, "a budget needs prices, which _kinds_of looked for"
    # So many instances for the whole time cost the budget. Fewer have too little time, more too little money.
    number = goal.usd / (price[1] * 24 * goal.days)
    below, above = max(1, floor(number)), max(1, ceil(number))
    # The number may be odd; layouts divide better by powers of two.
    power = 1 << (below.bit_length() - 1)
    near = sorted({below, above, power, 2 * power})
    offers = [offer for offer in map(kind.at, near) if offer is not None]
    if offers:
        return offers
    far = [2 * power << more for more in range(1, _DOUBLINGS)] + [power >> less for less in range(1, _DOUBLINGS)]
    return list(islice((offer for offer in map(kind.at, filter(None, far)) if offer is not None), 1))


_FIRST_FLOPS = 1e21  # of the model that is asked for first; every later one gets a cluster of its own
_MOST_SIZES = 10  # that are asked for; three are usual
_MOST_TOKENS = 1e18  # where the search for a model's best number of tokens ends


@dataclass(frozen=True)
class SizedRun:
    """A model of a size, and its training run."""

    purpose: str  # what its size is best for
    parameters: int
    best: BestSize  # that the law wants; the shape is the nearest one
    offer: Offer
    law: LossLaw
    generated: float  # tokens for which its size is best, too

    @property
    def tokens(self) -> int:
        return self.offer.request.tokens

    @property
    def loss(self) -> float:
        return self.law.loss(self.offer.request.model, self.offer.request.sequence, self.tokens)

    @property
    def forecast(self) -> PlannedLoss | None:
        """The loss with its range, by a ladder; None without one."""
        request = self.offer.request
        return self.law.forecast(request.model, request.sequence, self.tokens, request.tokens_per_step, None)

    @property
    def flops(self) -> float:
        """FLOPs of training, as the law counts them."""
        return self.law.flops(self.offer.request.model, self.offer.request.sequence, self.tokens)

    def lifetime_flops(self, generated: float) -> float:
        # Generating takes a third of the FLOPs of training.
        return self.flops + self.law.flops(self.offer.request.model, self.offer.request.sequence, generated) / 3

    @cached_property
    def size_range(self) -> SizeRange | None:
        """Sizes that the law leaves open; None if nobody says."""
        return self.law.size_range(self.flops, self.generated, self.offer.request.sequence)


@dataclass(frozen=True)
class ModelSize:
    """Answer to the question which model to train."""

    goal: Goal
    flops: float | None  # of the training, if given instead of a budget
    generated: float  # tokens over the model's life; 0 if nothing was said
    price: PriceKind | None
    runs: tuple[SizedRun, ...]  # the best for the tokens to be generated first, if any; then the least loss
    missed: dict[str, str]  # reason by kind of instance without an offer
    affords = True  # the number of tokens is chosen with the size

    @property
    def chosen(self) -> Offer:
        return self.runs[0].offer


def choose_model_size(question: PlanQuestion) -> ModelSize:
    """Choose the size of a model, its tokens and its cluster.

    Raises:
        HardwareError: an unknown instance or chip; names all of them.
        PlanError: neither a budget nor FLOPs, or both; no price is known, nothing fits, or the ladder determines no
            size.
    """
    flops, generated = question.flops, float(question.inference_tokens or 0)
    if (question.budget is None) == (flops is None):
        raise PlanError("the size of a model follows from a budget in USD or from FLOPs: give one of them")
    if any(value is not None and not 0 < value < 1e32 for value in (flops, question.inference_tokens)):
        raise PlanError("--flops and --inference-tokens must be positive numbers below 1e32")
    goal, law = parse_goal(question.deadline, question.budget), question.law
    purposes = [("least loss", 0.0)]
    if generated:
        purposes.insert(0, (f"{short_count(generated)} generated", generated))
    if flops is not None:
        return _for_flops(question, goal, flops, generated, purposes)
    purchases: dict[str, Purchase] = {}

    def purchase_of(name: str) -> Purchase:
        if name not in purchases:
            purchases[name] = choose_cluster(replace(question, model=name, ladder=None))
        return purchases[name]

    begin, runs = law.best_size(_FIRST_FLOPS, 0.0, question.sequence or SHAPE_SEQUENCE).parameters, []
    for purpose, tokens in purposes:
        runs.append(_determined(_agreed(law, purchase_of, begin, purpose, tokens)))
        begin = runs[-1].parameters
    first = purchases[runs[0].offer.request.name]
    return ModelSize(goal, None, generated, first.price, tuple(runs), first.missed)


def _agreed(
    law: LossLaw, purchase_of: Callable[[str], Purchase], begin: float, purpose: str, generated: float
) -> SizedRun:
    """Return the run of the size that the law wants for the compute that the budget buys for it."""
    tried: dict[int, SizedRun] = {}
    name, _, size = nearest_shape(begin)
    while size not in tried and len(tried) < _MOST_SIZES:
        offer = purchase_of(name).chosen
        request = offer.request
        flops = law.flops(request.model, request.sequence, request.tokens)
        best = law.best_size(flops, generated, request.sequence)
        tried[size] = SizedRun(purpose, size, best, offer, law, generated)
        name, _, size = nearest_shape(best.parameters)
    # Shapes are a few percent apart, and one may train more efficiently than the next. So the law can go round among
    # some: the answer is the one nearest to what the law wants for it.
    order = list(tried)
    around = order[order.index(size) :] if size in tried else order
    return min((tried[one] for one in around), key=lambda run: abs(log(run.best.parameters / run.parameters)))


def _determined(run: SizedRun) -> SizedRun:
    """Return a run whose size the law knows; PlanError if what it knows is too little to choose."""
    span = run.size_range
    if span is None or span.is_determined:
        return run
    flops = f"{run.flops:.2g}".replace("e+", "e")
    ends = "hlat knows shapes of {} to {}; more runs do not change that".format(*map(short_count, span.shapes))
    more = "add runs to the ladder: larger ones, and unlike sizes for the same compute"
    raise PlanError(
        f"the ladder does not determine the size for {flops} FLOPs: 4 of 5 laws that fit it as well want {span} "
        f"parameters. A choice needs a range of {WIDEST_SIZES:g} times at most, within the shapes that hlat knows. "
        f"Name a --model, leave --ladder out, or {f'ask for other FLOPs: {ends}' if span.at_edge else more}"
    )


def _for_flops(
    question: PlanQuestion, goal: Goal, flops: float, generated: float, purposes: list[tuple[str, float]]
) -> ModelSize:
    """Return the runs for an amount of compute: their sizes are known before anything is planned."""
    runs, law, sequence = [], question.law, question.sequence or SHAPE_SEQUENCE
    for purpose, tokens in purposes:
        best = law.best_size(flops, tokens, sequence)
        name, section, size = nearest_shape(best.parameters)
        tokens_of_size = max(1, round(flops / law.flops(ModelConfig.model_validate(section), sequence, 1)))
        found = choose_cluster(replace(question, model=name, tokens=tokens_of_size, ladder=None))
        runs.append(_determined(SizedRun(purpose, size, best, found.chosen, law, tokens)))
    return ModelSize(goal, flops, generated, found.price, tuple(runs), found.missed)


def optimal_tokens(request: PlanRequest) -> float:
    """Return the training tokens for which the model of a request has the best size, by the law of its question."""
    law, size = request.asked.law, count_parameters(request.model).total
    low, high = 1.0, _MOST_TOKENS
    # The best size grows with the FLOPs, so halving finds it.
    while high / low > 1 + 1e-12:
        tokens = (low * high) ** 0.5
        flops = law.flops(request.model, request.sequence, tokens)
        smaller = law.best_size(flops, 0.0, request.sequence).parameters < size
        low, high = (tokens, high) if smaller else (low, tokens)
    return low
