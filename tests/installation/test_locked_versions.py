"""requirements.lock, constraints.txt, pyproject.toml and README say the same of what is installed."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hlat.runtime.backend.torch_private import TESTED_RELEASES as TESTED_TORCH
from tests.support.runtime.torch_names import RELEASES_WITH_ALL_NAMES

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def locked() -> dict[str, tuple[Requirement, list[str]]]:
    """Requirement and hashes of each package in the lock file."""
    text = (ROOT / "requirements.lock").read_text().replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            head, *hashes = line.split("--hash=")
            requirement = Requirement(head.strip())
            found[canonicalize_name(requirement.name)] = (requirement, [one.strip() for one in hashes])
    return found


def constraints(*, docs: bool = True) -> dict[str, str]:
    """Versions by package; without those that only the extra docs needs, which are the last ones."""
    text = (ROOT / "constraints.txt").read_text()
    everything, for_docs, _ = text.partition("# Only for the extra docs")
    assert for_docs
    lines = [line for line in (text if docs else everything).splitlines() if not line.startswith("#")]
    pairs = [line.split("==") for line in lines]
    return {canonicalize_name(name): version for name, version in pairs}


def pinned(requirement: Requirement) -> str:
    (one,) = requirement.specifier
    assert one.operator == "==", requirement
    return one.version


def test_every_package_of_the_lock_is_pinned_and_has_hashes(locked: dict[str, tuple[Requirement, list[str]]]) -> None:
    for requirement, hashes in locked.values():
        assert pinned(requirement)
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in hashes), requirement


def test_the_lock_has_the_versions_of_the_constraints(locked: dict[str, tuple[Requirement, list[str]]]) -> None:
    assert constraints(docs=False).items() <= {name: pinned(one) for name, (one, _) in locked.items()}.items()


def test_the_documentations_packages_are_pinned() -> None:
    for one in map(Requirement, PROJECT["optional-dependencies"]["docs"]):
        assert one.specifier.contains(constraints()[canonicalize_name(one.name)])


def test_what_the_project_asks_for_is_locked(locked: dict[str, tuple[Requirement, list[str]]]) -> None:
    extras = PROJECT["optional-dependencies"]
    dev = [Requirement(text) for text in extras["dev"]]
    of_dev = {name for one in dev if one.name == "hlat" for name in one.extras}
    asked = [Requirement(text) for text in PROJECT["dependencies"]] + [one for one in dev if one.name != "hlat"]
    asked += [Requirement(text) for name in sorted(of_dev) for text in extras[name]]
    for one in asked:
        requirement, _ = locked[canonicalize_name(one.name)]
        assert one.specifier.contains(pinned(requirement)), one
        assert requirement.marker is None or requirement.marker.evaluate(dict(default_environment())), one


def test_a_wheel_carries_recipes_and_documentation() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    carried = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert carried == {"recipes": "hlat/recipes", "docs": "hlat/docs"}
    assert (ROOT / "recipes/quickstart.yaml").is_file() and (ROOT / "docs/README.md").is_file()


def test_what_a_run_may_use_is_in_the_extra_all() -> None:
    """All extras but those for work on hlat itself."""
    extras = PROJECT["optional-dependencies"]
    (everything,) = map(Requirement, extras["all"])
    for_work = {"all", "dev", "docs", "interop", "clusters", "kernels", "browser"}
    assert everything.extras == set(extras) - for_work


def test_torch_is_bounded_by_what_was_tested_and_seen() -> None:
    (torch,) = (Requirement(text) for text in PROJECT["dependencies"] if Requirement(text).name == "torch")
    assert set(TESTED_TORCH) <= set(RELEASES_WITH_ALL_NAMES)
    assert all(torch.specifier.contains(f"{release}.1") for release in RELEASES_WITH_ALL_NAMES)
    assert constraints()["torch"].rpartition(".")[0] in TESTED_TORCH
    assert not torch.specifier.contains("2.10.9") and not torch.specifier.contains("2.15.0")


def test_nothing_names_a_machine_or_an_index() -> None:
    """Package indexes are settings of each machine, not of the project."""
    for name in ("constraints.txt", "requirements.lock"):
        text = (ROOT / name).read_text()
        assert not re.search(r"://|--(extra-)?index|--find-links|--trusted", text), name


def test_constraints_have_no_hashes() -> None:
    """With a hash in them pip asks for one of every requirement, and a folder as `.` cannot have one."""
    assert "--hash" not in (ROOT / "constraints.txt").read_text()
    commands = re.findall(r"<!-- \w+ -->\n```bash\n(.*?)\n```", (ROOT / "README.md").read_text())
    assert len(commands) == 2 and all("pip install -c constraints.txt" in command for command in commands)
