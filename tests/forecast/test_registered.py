"""A registered forecast is what was written, once, or it is refused."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from hlat.forecast import FORECAST_FILE, Forecast, LossRange, read_forecast, write_forecast
from hlat.runtime.errors import PlanError

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)
FORECAST = Forecast(
    ladder="0123456789abcdef",
    tokens=10**9,
    end=LossRange(3.0, 2.9, 3.1),
    curve=((0.5, LossRange(3.4, 3.2, 3.6)), (1.0, LossRange(3.0, 2.9, 3.1))),
    sizes={"total": 3e7, "non_embedding": 2e7, "flops": 2.5e7},
    kind="non_embedding",
)


def test_a_forecast_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_forecast(tmp_path) is None
    write_forecast(tmp_path, FORECAST, NOON)
    found = read_forecast(tmp_path)
    assert found is not None and found.written == "2026-11-29T12:00:00+00:00"
    assert (found.end, found.curve, found.sizes, found.kind) == (
        FORECAST.end,
        FORECAST.curve,
        FORECAST.sizes,
        FORECAST.kind,
    )


def test_the_first_time_stays_and_another_forecast_is_refused(tmp_path: Path) -> None:
    write_forecast(tmp_path, FORECAST, NOON)
    write_forecast(tmp_path, FORECAST, datetime(2027, 1, 1, tzinfo=UTC))
    assert read_forecast(tmp_path).written == "2026-11-29T12:00:00+00:00"  # type: ignore[union-attr]
    with pytest.raises(PlanError, match="another forecast of this run was registered at 2026-11-29"):
        write_forecast(tmp_path, Forecast("other", 1, LossRange(1.0, 1.0, 1.0), ()), NOON)


@pytest.mark.parametrize("field, value", [("tokens", 2), ("end", {"loss": 3.0, "low": 2.0, "high": 4.0}), ("new", 1)])
def test_an_edited_forecast_is_refused(tmp_path: Path, field: str, value: object) -> None:
    write_forecast(tmp_path, FORECAST, NOON)
    path = tmp_path / FORECAST_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(PlanError, match=r"forecast\.json: .* edited after it was written"):
        read_forecast(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sha256": 1}', "\x00"])
def test_what_is_no_forecast_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FORECAST_FILE).write_text(text)
    with pytest.raises(PlanError, match=r"forecast\.json"):
        read_forecast(tmp_path)
