"""The choice of a cluster: against a plan of every number of instances, and against what a buyer knows."""

import json
import shlex
from pathlib import Path

import pytest

import hlat
from hlat.planner.offers import KNEE, _time, parse_goal
from hlat.planner.plan import make_plan
from hlat.planner.problem.request import PlanRequest
from hlat.planner.purchase import Purchase, missed_by_reason
from hlat.planner.purchase_table import purchase_lines
from hlat.planner.search import TIE_TOLERANCE, best_layout
from hlat.runtime.errors import HardwareError, PlanError
from tests.support.commands import hlat as hlat_command
from tests.support.planner.requests import request_for

MODEL = {"tokens": 10**11, "sequence": 4096, "global_batch": 512, "precision": "mixed"}


def chosen(chips: str = "p4d.24xlarge", **more: str | Path) -> Purchase:
    return hlat.choose_cluster("llama-3.2-1b", chips=chips, **MODEL, **more)


@pytest.fixture(scope="module")
def planned() -> dict:
    """Plans for every number of p4d instances up to 8 that has one."""
    found = {}
    for number in range(1, 9):
        try:
            found[number] = hlat.plan("llama-3.2-1b", f"p4d.24xlarge:{number}", **MODEL)
        except PlanError:
            continue
    return found


@pytest.mark.parametrize("days", [4.0, 9.0])
def test_the_smallest_number_that_meets_a_deadline(planned: dict, days: float) -> None:
    """No smaller number does, by a plan of each. A tie between layouts may be broken otherwise: see ``best_layout``.

    A larger number may be slower: on 5 or 7 instances a batch of 512 needs pipelines of as many stages.
    """
    offer = chosen(deadline=f"{days}d").chosen
    in_time = [number for number, plan in planned.items() if plan.chosen.days * (1 + TIE_TOLERANCE) <= days]
    assert offer.days <= days and all(number >= offer.cluster.count for number in in_time)
    assert offer.days == pytest.approx(planned[offer.cluster.count].chosen.days, rel=TIE_TOLERANCE)


def test_the_fastest_within_a_budget(planned: dict) -> None:
    costs = {number: plan.chosen.cost_usd for number, plan in planned.items()}
    budget = max(costs.values()) * 1.01
    found = chosen(budget=f"{budget:.0f}")
    offer = found.chosen
    assert offer.usd <= budget and offer.cluster.count >= max(planned)
    assert all(other.usd > budget or other.days >= offer.days for other in found.sizes)


def test_without_a_goal_the_cost_is_on_the_flat_part() -> None:
    found = chosen()
    cheapest = min(offer.usd for offer in found.sizes)
    assert found.chosen.usd <= KNEE * cheapest
    assert all(offer.usd > KNEE * cheapest for offer in found.sizes if offer.days < found.chosen.days)


def test_more_time_never_costs_more_and_more_money_is_never_slower() -> None:
    by_time = [chosen(deadline=f"{days}d").chosen.usd for days in (1, 2, 4, 8, 16)]
    assert by_time == sorted(by_time, reverse=True)
    by_money = [chosen(budget=f"{thousands}k").chosen.days for thousands in (12, 15, 20)]
    assert by_money == sorted(by_money, reverse=True)


def test_of_several_kinds_the_cheapest_comes_first_and_those_that_miss_are_named() -> None:
    found = chosen("p4d.24xlarge,p5.48xlarge,trn2.48xlarge", deadline="3d")
    assert [offer.usd for offer in found.rows] == sorted(offer.usd for offer in found.rows)
    assert {offer.cluster.instance.name for offer in found.rows} | found.missed.keys() == {
        "p4d.24xlarge",
        "p5.48xlarge",
        "trn2.48xlarge",
    }


@pytest.mark.parametrize(
    ("goal", "tokens"),
    [({"budget": "5k"}, None), ({"deadline": "14d"}, 10**10), ({"budget": "5k", "deadline": "14d"}, None)],
)
def test_a_kind_that_refuses_an_option_is_missed_and_says_why(goal: dict, tokens: int | None) -> None:
    run = {**MODEL, "tokens": tokens, "precision": "fp8"}
    found = hlat.choose_cluster("llama-3.2-1b", chips="p4d.24xlarge,p5.48xlarge", **goal, **run)
    assert found.chosen.cluster.instance.name == "p5.48xlarge"
    assert "A100 40GB does not support fp8" in found.missed["p4d.24xlarge"]
    assert found.affords == ("budget" in goal and tokens is None)
    with pytest.raises(PlanError, match=r"p4d.24xlarge: --precision fp8: A100 .*\n  trn1.32xlarge: .*Trainium1"):
        hlat.choose_cluster("llama-3.2-1b", chips="p4d.24xlarge,trn1.32xlarge", **goal, **run)


def test_a_quote_counts_for_every_chip_and_changes_nothing_else() -> None:
    one, two = (chosen("h100", deadline="3d", price=price).chosen for price in ("2.10/h", "4.20/gpu-h"))
    assert (one.cluster.name, one.days) == (two.cluster.name, two.days)
    assert two.usd == pytest.approx(2 * one.usd)
    assert one.usd == pytest.approx(one.days * 24 * 2.10 * one.cluster.chips)
    of_instances = chosen("h100", deadline="3d", price="16.80/instance-h").chosen
    assert of_instances.usd == pytest.approx(one.usd)


def test_interruptions_of_spot_instances_cost_time() -> None:
    """Each costs a restart and half an interval of work; more of them never help."""
    days = [hlat.plan("llama-3.2-1b", "h100:8", interruptions=rate, **MODEL).chosen.days for rate in (0.0, 0.5, 5.0)]
    assert days[0] < days[1] < days[2]


def test_an_impossible_goal_says_how_close_each_kind_comes() -> None:
    with pytest.raises(PlanError, match=r"p4d.24xlarge: the fastest is p4d.24xlarge:\d+ with 0\.\d+ days"):
        chosen(deadline="0.01h")
    with pytest.raises(PlanError, match=r"the cheapest is p4d.24xlarge:\d+ with \$[\d.,]+k?"):
        chosen(budget="10")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"deadline": "5"}, "--deadline 5: must be a positive time"),
        ({"budget": "0"}, "--budget 0: must be a positive number"),
        ({"price": "0/h"}, "--price 0/h: must be a positive number"),
        ({"price": "cheap"}, "--price cheap: a price is one of"),
    ],
)
def test_bad_goals_are_refused(arguments: dict[str, str], says: str) -> None:
    with pytest.raises((PlanError, HardwareError), match=says):
        chosen(**arguments)


def test_goals_are_read_in_the_spellings_that_people_use() -> None:
    assert [parse_goal(text, None).days for text in ("36h", "14d", "2w", "1.5 D")] == [1.5, 14.0, 14.0, 1.5]
    assert [parse_goal(None, text).usd for text in ("50000", "50,000", "$50k", "0.05M", "50_000 USD")] == [50_000.0] * 5


@pytest.mark.parametrize(("deadline", "says"), [("0.5h", "0.5 hours"), ("1h", "1 hour"), ("1d", "1 day")])
def test_a_deadline_of_one_is_singular(deadline: str, says: str) -> None:
    assert _time(parse_goal(deadline, None).days or 0.0) == says


def test_chips_instead_of_instances() -> None:
    """Sixteen chips are two instances of eight; one chip is an eighth of the price of eight."""
    assert hlat.plan("llama-3.2-1b", "p4d.24xlarge:16", per="chip", **MODEL).request.cluster.count == 2
    part = hlat.plan("llama-3.2-1b", "p4d.24xlarge:1", per="chip", **MODEL).request.cluster
    whole = hlat.plan("llama-3.2-1b", "p4d.24xlarge:1", **MODEL).request.cluster
    assert (part.devices, whole.devices) == (1, 8)
    assert part.price()[1] == pytest.approx(whole.price()[1] / 8)
    with pytest.raises(HardwareError, match=r"17 chips are not complete instances of 8; write p4d\.24xlarge:16"):
        hlat.plan("llama-3.2-1b", "p4d.24xlarge:17", per="chip", **MODEL)


@pytest.mark.parametrize(
    ("model", "cluster"), [("llama-2-7b", "trn1.32xlarge:8"), ("llama-2-70b", "h100:8"), ("llama-3.2-1b", "h100:2")]
)
def test_the_quick_search_takes_the_layout_of_the_plan(model: str, cluster: str) -> None:
    request: PlanRequest = request_for(model, cluster)
    plan, quick = make_plan(request), best_layout(request)
    assert quick is not None and quick.step_seconds == pytest.approx(plan.chosen.step_seconds, rel=TIE_TOLERANCE)


@pytest.mark.parametrize("price", [[], ["--price", "2.10/h"]], ids=["of the catalog", "quoted"])
def test_the_command_that_is_suggested_plans_what_was_chosen(price: list[str]) -> None:
    """With the tokens, lengths and prices of the question; a tie may be broken otherwise: see ``best_layout``."""
    words = ["--tokens", "20B", "--sequence-length", "1024", "--global-batch", "256", "--precision", "mixed"]
    words += ["--interruptions", "2"]
    question = ["plan", "--model", "llama-3.2-1b", "--chips", "p4d.24xlarge", *words, *price]
    chosen_one = json.loads(hlat_command(*question, "--json").stdout)["chosen"]
    suggested = shlex.split(hlat_command(*question).stdout.partition("Its plan:")[2].replace("\\\n", " "))
    planned_one = json.loads(hlat_command(*suggested[1:], "--json").stdout)["chosen"]
    assert planned_one["days"] == pytest.approx(chosen_one["days"], rel=TIE_TOLERANCE)
    assert planned_one["cost_usd"] == pytest.approx(chosen_one["cost_usd"], rel=TIE_TOLERANCE)


def test_chips_that_multiply_in_fp16_only_can_be_bought() -> None:
    """A chip is offered if it can be planned for, as by ``--cluster v100:1``."""
    found = hlat.choose_cluster("tinyllama-1.1b", chips="V100 16GB", tokens=10**9, deadline="20d")
    assert found.chosen.cluster.chip.name == "V100 16GB"


QUOTES = """cloud,region,instance,on-demand,reserved,spot,date,source
aws,us-east-1,p5.48xlarge,,44,,2026-11-20,
b,,p5.48xlarge,,40,,2026-11-20,mail
aws,us-east-1,p4d.24xlarge,,,16,2026-11-20,
"""


def quotes_in(folder: Path, text: str = QUOTES) -> Path:
    (folder / "quotes.csv").write_text(text)
    return folder / "quotes.csv"


def test_of_quotes_each_cluster_has_its_own_price(tmp_path: Path) -> None:
    """Any means the quoted machines; each at the first kind of price that it has: 40 reserved, and 16 spot."""
    file = quotes_in(tmp_path)
    found = chosen("any", quotes=file, deadline="9d")
    usd_per_day = {offer.cluster.instance.name: offer.usd / offer.days / offer.cluster.count for offer in found.rows}
    assert usd_per_day == pytest.approx({"p5.48xlarge": 24 * 40, "p4d.24xlarge": 24 * 16})
    assert found.price is None and not found.missed
    lines = "\n".join(purchase_lines(found, 200))
    assert "each at its first kind of price (--price names one for all)" in lines
    for offer in found.rows:
        assert f"price    {offer.cluster.name}: " in lines and f"cost     {offer.cluster.name}: " in lines
    assert "reserved: b, quoted 2026-11-20, the cheapest of 2 places, mail" in lines
    assert "spot: aws us-east-1, quoted 2026-11-20; taken away no more often" in lines
    one = chosen("any", quotes=file, deadline="9d", price="reserved")
    assert [offer.cluster.instance.name for offer in one.rows] == ["p5.48xlarge"]
    assert one.missed == {"p4d.24xlarge": "no reserved price is known"}


def test_quotes_with_a_common_kind_are_compared_in_it(tmp_path: Path) -> None:
    """Not in the first kind of either: on demand is quoted for one alone."""
    rows = QUOTES.replace("us-east-1,p5.48xlarge,,44,", "us-east-1,p5.48xlarge,50,44,").replace(",,16,", ",18,16,")
    found = chosen("any", quotes=quotes_in(tmp_path, rows), deadline="9d")
    assert found.price == "reserved" and {offer.request.price for offer in found.rows} == {"reserved"}


@pytest.mark.parametrize(
    ("kind", "says"), [("own", "--price X/h for a chip"), ("spot", "--price X/h --interruptions N")]
)
def test_a_kind_of_price_that_nobody_knows_is_asked_for_once(kind: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        chosen("any", price=kind)
    message = str(caught.value)
    assert message.count("price is known") == 1 and "\n" not in message
    assert says in message and f"--quotes FILE with a column {kind}" in message and "and 7 more" in message
    with pytest.raises(PlanError, match=rf"no {kind} price is known for p5.48xlarge; known: on-demand.*{says}"):
        hlat.plan("llama-3.2-1b", "p5.48xlarge:1", price=kind, **MODEL)


def test_kinds_that_are_missed_for_one_reason_share_a_line() -> None:
    assert missed_by_reason({"a": "no", "b": "far", "c": "no"}) == [("a, c", "no"), ("b", "far")]


def test_a_price_and_quotes_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"--price 2.10/h and --quotes .*: both give prices"):
        chosen(price="2.10/h", quotes=quotes_in(tmp_path))
