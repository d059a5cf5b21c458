"""Numbers as people type them: read by the type of the field, shown back in full, refused if they have two meanings."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.config import RecipeError
from hlat.config.load import parse_recipe
from hlat.planner.problem.question import parse_amount
from hlat.runtime.errors import PlanError
from hlat.runtime.quantities import (
    QuantityError,
    parse_bytes,
    parse_gibibytes,
    parse_length,
    parse_seconds,
    parse_share,
    parse_whole,
)

READ = [
    *((parse_whole, text, 100_000_000) for text in ("100M", "1e8", "0.1B", "0.1G", "100_000_000", "100,000,000")),
    *((parse_whole, text, 10 * 10**9) for text in ("10B", "10b", " 10 B ", "10G", "0.01T", "1E10")),
    *((parse_whole, text, 1500) for text in ("1.5K", "1.5k", "1500")),
    (parse_whole, "64Ki", 65536),
    *((parse_length, text, 4096) for text in ("4Ki", "4096", "4_096")),
    *((parse_bytes, text, 95 * 2**20) for text in ("95MiB", "99614720")),
    *((parse_bytes, text, 10**8) for text in ("100MB", "100M", "0.1GB", "1e8")),
    *((parse_gibibytes, text, 20.0) for text in ("20GiB", "20", "20480MiB")),
    (parse_gibibytes, "20GB", 20e9 / 2**30),
    *((parse_seconds, text, 10_800.0) for text in ("3h", "10800", "180min", "2h60min", "3 hours", "10800s")),
    (parse_seconds, "500ms", 0.5),
    (parse_seconds, "1w", 604_800.0),
    *((parse_share, text, 0.8) for text in ("80%", "0.8", "80 %")),
]
REFUSED = [
    *((parse_whole, text) for text in ("3m", "1.5", "1.0005K", "80%", "3h", "1e-3")),
    *((parse_length, text) for text in ("4K", "4k", "3m")),
    *((parse_bytes, text) for text in ("2B", "3m")),
    *((parse_gibibytes, text) for text in ("20G", "20Gi", "20M")),
    *((parse_seconds, text) for text in ("3m", "3M", "1h3m")),
]
NOT_NUMBERS = [
    *((parse_whole, text) for text in ("", "many", "1..5", "M", "1 2", "1,00", "12QB", "0x10", "inf", "9" * 99)),
    *((parse_whole, text) for text in ("e2", "+E5", "-.", "+")),
    *((parse_seconds, text) for text in ("", "soon", "1:30", "3 parsecs", "e2")),
    *((parse_share, text) for text in ("", "half", "3h", "e-1")),
]


@pytest.mark.parametrize(("parse", "text", "number"), READ)
def test_it_is_read(parse, text, number):
    assert parse(text) == pytest.approx(number, rel=1e-15)


@pytest.mark.parametrize(("parse", "text"), REFUSED)
def test_what_has_two_meanings_or_is_not_whole_is_refused(parse, text):
    with pytest.raises(QuantityError, match=text.strip()):
        parse(text)


@pytest.mark.parametrize(("parse", "text"), NOT_NUMBERS)
def test_what_is_no_number_is_left_to_the_caller(parse, text):
    assert parse(text) is None


@given(st.integers(min_value=0, max_value=10**15), st.sampled_from("KMBT"))
def test_a_number_written_with_a_unit_is_that_number(number, unit):
    scale = {"K": 3, "M": 6, "B": 9, "T": 12}[unit]
    digits = str(number).rjust(scale + 1, "0")
    assert parse_whole(f"{digits[:-scale]}.{digits[-scale:]}{unit}") == number


BASE: dict[str, Any] = {"model": {"preset": "tiny-1m"}, "data": {"path": "x"}, "training": {"steps": 10}}


def with_value(path: str, value: Any) -> dict[str, Any]:
    section, name = path.split(".")
    return {**BASE, section: {**BASE.get(section, {}), name: value}}


@pytest.mark.parametrize(
    ("path", "text", "number"),
    [
        ("training.tokens", "100M", 100_000_000),
        ("training.steps", "2K", 2000),
        ("batch.global_batch", "1Ki", 1024),
        ("checkpoint.every_steps", "1e3", 1000),
        ("evaluation.every_tokens", "1B", 10**9),
        ("data.shard_tokens", "50M", 50_000_000),
        ("data.sequence_length", "2Ki", 2048),
        ("data.cache_gib", "10GiB", 10.0),
        ("data.unreadable_rows", "0.5%", 0.005),
        ("schedule.min_ratio", "10%", 0.1),
        ("recovery.deadline_seconds", "3h", 10_800.0),
        ("recovery.hang_seconds", "2min", 120.0),
        ("tracking.flush_seconds", "30s", 30.0),
    ],
)
def test_a_recipe_reads_them_by_the_type_of_the_field(path, text, number):
    given = with_value(path, text)
    if path == "training.tokens":
        del given["training"]["steps"]
    recipe = parse_recipe(given)
    section, name = path.split(".")
    assert getattr(getattr(recipe, section), name) == pytest.approx(number, rel=1e-15)
    assert parse_recipe(recipe.model_dump(mode="json")) == recipe  # saved as plain numbers


def test_a_refused_number_is_one_problem_with_both_meanings():
    with pytest.raises(RecipeError) as caught:
        parse_recipe(with_value("data.sequence_length", "4K"))
    (problem,) = caught.value.problems
    assert str(problem) == "data.sequence_length = '4K': 4K may mean 4,000 or 4,096; write 4000 or 4Ki."


def test_check_shows_them_in_full(cli, recipe_file, tiny):
    done = cli("check", recipe_file, *tiny, "data.shard_tokens=100M", "recovery.deadline_seconds=3h", "--no-files")
    assert "data.shard_tokens: 100M = 100,000,000" in done.stdout
    assert "recovery.deadline_seconds: 3h = 10,800.0" in done.stdout


def test_options_of_the_command_line_take_the_same():
    assert parse_amount("300B") == parse_amount("3e11") == 300 * 10**9
    with pytest.raises(PlanError, match=r"--tokens 3m: 3m may mean millions or minutes"):
        parse_amount("3m")
