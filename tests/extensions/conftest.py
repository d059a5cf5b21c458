"""The distribution of this folder, installed into a folder as pip would, and a recipe that names its parts."""

import importlib
import os
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

DISTRIBUTION = Path(__file__).parent / "distribution"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the package and the metadata that its pyproject.toml describes."""
    folder = tmp_path_factory.mktemp("site")
    project = tomllib.loads((DISTRIBUTION / "pyproject.toml").read_text())["project"]
    shutil.copytree(DISTRIBUTION / "hlat_extras", folder / "hlat_extras")
    info = folder / f"hlat_extras-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [line for group, names in groups for line in (f"[{group}]", *(f"{n} = {v}" for n, v in names.items()))]
    (info / "entry_points.txt").write_text("\n".join([*lines, ""]))
    return folder


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The distribution, for this process and those that it starts."""
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    importlib.invalidate_caches()
    yield site


@pytest.fixture
def content(tiny_recipe: str, corpus: Path, prepared: Path, tmp_path: Path) -> dict[str, Any]:
    """A recipe with an own part at every seam: half of them by entry point, half by module path."""
    content: dict[str, Any] = yaml.safe_load(tiny_recipe)
    content["run"] = {"name": "own", "dir": str(tmp_path / "run")}
    content["data"] |= {"path": str(corpus), "prepared_dir": str(prepared)}
    content["model"] |= {"architecture": "parallel-block", "residual_scale": 0.7}
    content["optimizer"] = {"kind": "lion", "lr": 1e-3, "betas": [0.95, 0.98]}
    content["schedule"] = {"kind": "hlat_extras.schedules:inverse_sqrt", "warmup_steps": 2, "timescale": 5}
    content["training"] = {
        "steps": 8,
        "log_every": 1,
        "seed": 3,
        "loss_terms": {"label-smoothing": {"epsilon": 0.05}},
        "components": {"largest": {}},
    }
    content["checkpoint"] = {"every_steps": 3, "keep_last": 9, "background": False}
    content["evaluation"] |= {"tasks": ["colours"]}
    content["tracking"] = {"tensorboard": False, "console": "plain", "trackers": {"hlat_extras.trackers:Lines": {}}}
    return content
