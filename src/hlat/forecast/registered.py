"""The forecast of a run, written into its folder before the run can prove it wrong.

write_forecast --> runs/NAME/forecast.json: Forecast, time, sha256 of both --read_forecast--> Forecast, or PlanError
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from hlat.config import Recipe
from hlat.forecast.fitting import LossRange
from hlat.forecast.ladder import Forecast, read_ladder
from hlat.runtime.errors import PlanError
from hlat.runtime.storage.local_files import read_small_file, write_atomic

FORECAST_FILE = "forecast.json"
_VERSION = 1


def forecast_json(forecast: Forecast) -> dict[str, Any]:
    """Return a forecast as JSON values, with a sha256 over all others."""
    content = {"version": _VERSION, **dataclasses.asdict(forecast)}
    content["end"] = forecast.end._asdict()
    content["curve"] = [{"fraction": fraction, **loss._asdict()} for fraction, loss in forecast.curve]
    if not forecast.tasks:  # files without them keep their sha256
        del content["tasks"]
    return {**content, "sha256": _hash(content)}


def parse_forecast(content: Mapping[str, Any]) -> Forecast:
    """Return the forecast of ``forecast_json``; ValueError, KeyError or TypeError if it was edited or is none."""
    values = {**content}
    if values.pop("sha256") != _hash(values):
        raise ValueError("its sha256 is not that of its content, so it was edited after it was written")
    if values.pop("version") != _VERSION:
        raise ValueError("it was written by another version of hlat")
    values["end"] = LossRange(**values["end"])
    values["curve"] = tuple((point.pop("fraction"), LossRange(**point)) for point in map(dict, values["curve"]))
    values["tasks"] = {task: tuple(accuracy) for task, accuracy in values.get("tasks", {}).items()}
    return Forecast(**{**values, "warnings": tuple(values["warnings"])})


def write_forecast(folder: Path, forecast: Forecast, written: datetime) -> None:
    """Register the forecast of the run in a folder.

    The same forecast may be written again: its first time stays.

    Raises:
        PlanError: another forecast is registered there, or the file cannot be read.
    """
    if (known := read_forecast(folder)) is not None:
        if dataclasses.replace(known, written=forecast.written) != forecast:
            raise PlanError(
                f"{folder / FORECAST_FILE}: another forecast of this run was registered at {known.written}, and a "
                "registered forecast is not replaced. Give the run a name of its own, or keep that forecast."
            )
        return
    content = forecast_json(dataclasses.replace(forecast, written=written.isoformat(timespec="seconds")))
    write_atomic(folder / FORECAST_FILE, json.dumps(content, indent=1, allow_nan=False).encode())


def read_forecast(folder: Path) -> Forecast | None:
    """Return the forecast registered for the run in a folder; PlanError if it was edited or cannot be read."""
    path = folder / FORECAST_FILE
    try:
        return parse_forecast(json.loads(read_small_file(path, kind="a forecast")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise PlanError(
            f"{path}: it is no forecast that can be trusted ({reason}). Restore the file from a copy, or delete it to "
            "have the run reported without a forecast."
        ) from error


def recipe_forecast(recipe: Recipe) -> Forecast:
    """Forecast the run of a recipe by its ``run.ladder``.

    PlanError: that is no ladder, or has no law for this run, or losses of this recipe cannot be compared with its own.
    """
    assert recipe.run.ladder is not None, "a recipe that names a ladder"
    return read_ladder(Path(recipe.run.ladder)).forecast_recipe(recipe)


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()
