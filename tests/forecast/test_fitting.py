"""Laws and ranges fitted to runs of a known law; the objective against torch's L-BFGS."""

import math

import numpy as np
import pytest
import torch

from hlat.forecast import LawFit, Observation, ScalingLaw, fit_law, fit_range
from tests.forecast.ladders import LAW, observations

TARGET = 1.5e9, 6e10


def constants(law: ScalingLaw) -> list[float]:
    return [law.irreducible, law.a, law.b, law.alpha, law.beta]


@pytest.mark.parametrize("law", [LAW, ScalingLaw(0.8, 30.0, 5e4, 0.2, 0.55), ScalingLaw(2.5, 5e4, 60.0, 0.65, 0.15)])
def test_a_law_without_noise_is_recovered(law: ScalingLaw) -> None:
    assert constants(fit_law(observations(law))) == pytest.approx(constants(law), rel=1e-6)


def test_the_objective_of_hoffmann_et_al_is_minimized() -> None:
    """Their objective in plain torch, minimized by L-BFGS from the true law: ours is no worse."""
    runs = observations(noise=0.01, seed=3)
    sizes, tokens, losses = (torch.tensor([run[at] for run in runs], dtype=torch.float64) for at in range(3))

    def objective(values: torch.Tensor) -> torch.Tensor:
        e, a, b, alpha, beta = values
        terms = torch.stack([e.expand(len(runs)), a - alpha * sizes.log(), b - beta * tokens.log()])
        residuals = torch.logsumexp(terms, dim=0) - losses.log()
        return torch.nn.functional.huber_loss(residuals, torch.zeros_like(residuals), reduction="sum", delta=1e-3)

    logs = [math.log(LAW.irreducible), math.log(LAW.a), math.log(LAW.b), LAW.alpha, LAW.beta]
    theirs = torch.tensor(logs, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([theirs], max_iter=400, line_search_fn="strong_wolfe", tolerance_change=1e-14)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = objective(theirs) * 1e4
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[arg-type, no-untyped-call]
    law = fit_law(runs)
    ours = torch.tensor([*np.log(constants(law)[:3]), law.alpha, law.beta], dtype=torch.float64)
    assert float(objective(ours)) <= float(objective(theirs.detach())) * (1 + 1e-6)


def test_one_run_that_went_wrong_moves_the_law_little() -> None:
    runs = observations()
    runs[5] = runs[5]._replace(loss=runs[5].loss * 1.3)
    # Beyond the threshold the run pulls with the weight of a residual of 0.001, so of 0.3 a few thousandths are left.
    assert fit_law(runs).loss(*TARGET) == pytest.approx(LAW.loss(*TARGET), rel=5e-3)
    assert fit_range(runs).law.loss(*TARGET) == pytest.approx(LAW.loss(*TARGET), rel=0.02)


def repeats(noise: float, count: int, seed: int) -> list[Observation]:
    """The cheapest run, again with other seeds."""
    size, tokens, *_ = observations()[0]
    draw = np.random.default_rng(10**4 + seed).normal(0, noise, count)
    return [Observation(size, tokens, LAW.loss(size, tokens) * math.exp(one), f"seed {one}") for one in draw]


def held(seeds: range, noise: float, shared: float = 0.0, again: int = 0) -> int:
    """Count seeds whose range holds the loss of a run 100 times beyond the ladder, drawn with the same noise."""
    count = 0
    for seed in seeds:
        whole = math.hypot(noise, shared)
        fit = fit_range(
            [*observations(noise=noise, seed=seed, shared=shared), *repeats(whole, again, seed)], samples=60
        )
        own = np.random.default_rng(10**6 + seed).normal(0, whole)
        loss = LAW.loss(*TARGET) * math.exp(own)
        count += fit.loss(*TARGET).low <= loss <= fit.loss(*TARGET).high
    return count


def test_ranges_hold_runs_of_the_law() -> None:
    # The law of these runs is exact, and ranges also expect it to be wrong, so they hold 80 % of the runs or more. Of
    # 15 runs at 80 %, fewer than 8 are held in 1 of 230 cases; seeds make this one case for ever.
    assert held(range(15), 0.003) >= 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "noise, shared, again", [(0.001, 0.0, 0), (0.01, 0.0, 0), (0.002, 0.002, 0), (0.003, 0.01, 4), (0.003, 0.02, 4)]
)
def test_ranges_hold_runs_of_more_or_less_noise(noise: float, shared: float, again: int) -> None:
    assert held(range(150), noise, shared, again) >= 150 * 0.8 - 3 * math.sqrt(150 * 0.8 * 0.2)


def test_other_seeds_of_one_run_show_what_runs_of_a_size_hide() -> None:
    """Sizes are off by 2 %, at all of their lengths alike. Of one run with four other seeds, a range learns that."""
    noise, seeds = 0.02, range(12)
    # Without them, a range holds about 2 of 3 runs. Of 12 runs at 80 %, fewer than 7 are held in 1 of 52 cases.
    assert held(seeds, 0.003, noise, again=4) >= 7
    once = observations(noise=0.003, seed=1, shared=noise)
    more = repeats(noise, 4, 1)
    fit, without = fit_range([*once, *more]), fit_range(once)
    logs = np.log([run.loss for run in (once[0], *more)])
    assert fit.seed_noise == fit.noise == pytest.approx(float(np.std(logs, ddof=1))) and without.seed_noise == 0.0
    assert fit.left_out == without.left_out == 5, "of the 16 that differ by more than their seeds"
    assert fit.freedom == 4, "five seeds leave it open how large their noise is"


def test_a_law_is_nearer_when_it_is_known_what_runs_of_a_size_share() -> None:
    """Generalized least squares: the four lengths of a size are worth little more than one run of it."""

    def error(again: int) -> float:
        pairs = [(observations(noise=0.003, seed=seed, shared=0.02), repeats(0.02, again, seed)) for seed in range(12)]
        laws = [fit_range([*runs, *more], samples=2).law for runs, more in pairs]
        return float(np.sqrt(np.mean([math.log(law.loss(*TARGET) / LAW.loss(*TARGET)) ** 2 for law in laws])))

    # With 30 draws 0.036 against 0.066. Five runs at one point instead of one cannot do that by themselves: 0.051 if
    # the noise between them is not used.
    assert error(again=4) < 0.8 * error(again=0)


def test_repeated_runs_that_agree_change_little() -> None:
    runs = observations(noise=0.003, seed=1)
    same = [runs[0]._replace(trunk=f"seed {number}") for number in range(4)]
    losses = [fit_range(some).loss(*TARGET) for some in (runs, [*runs, *same])]
    # Their noise of zero says nothing: that of the residuals stays. The law may move within its range.
    assert losses[1].loss == pytest.approx(losses[0].loss, rel=0.01)
    assert math.log(losses[1].high / losses[1].low) == pytest.approx(math.log(losses[0].high / losses[0].low), rel=0.3)


def test_forks_of_a_trunk_say_less_than_runs_of_their_own() -> None:
    def width(fit: LawFit) -> float:
        return float(np.std(np.log([law.loss(*TARGET) for law in fit.samples])))

    runs = observations(noise=0.003)
    assert width(fit_range([run._replace(trunk=f"{run.size}") for run in runs])) > 1.1 * width(fit_range(runs))


def test_a_law_that_fails_for_the_largest_runs_has_a_wider_range() -> None:
    runs = observations(noise=0.001)
    ordered = sorted(runs, key=lambda run: run.size * run.tokens)
    bent = [*ordered[:11], *(run._replace(loss=1.05 * run.loss) for run in ordered[11:])]
    fit = fit_range(bent)
    assert fit.width > 1.3 * fit_range(runs).width and fit.error == pytest.approx(0.05, rel=0.3)


def test_a_range_grows_with_the_fall_of_the_loss_beyond_the_runs() -> None:
    fit = fit_range(observations())
    loss, low, high = fit.loss(*TARGET)
    fall = math.log(min(run.loss for run in observations()) / loss)
    # 12 % of the fall is a standard deviation, of which a range of 4 of 5 has 1.28 on each side; 200 samples place its
    # ends within 1.1 / sqrt(200) = 8 % of that, one standard deviation.
    assert math.log(high / low) / 2 > 0.8 * 1.28 * 0.12 * fall * fit.width


def test_fewer_runs_leave_a_wider_range() -> None:
    runs = observations(noise=0.003)
    few, many = (fit_range(some).loss(*TARGET) for some in (runs[::3], runs))
    assert math.log(few.high / few.low) > 1.2 * math.log(many.high / many.low)


def test_the_same_runs_give_the_same_bits() -> None:
    runs = observations(noise=0.003)
    assert fit_range(runs) == fit_range(runs)


def test_too_few_runs_are_refused() -> None:
    for fit in (fit_law, fit_range):
        with pytest.raises(ValueError, match="4 runs do not determine"):
            fit([Observation(1e6, 1e8, 4.0)] * 4)
