"""The command that a message gives installs an extra as hlat itself was installed."""

import json
from importlib.metadata import distribution
from typing import Any

import pytest

from hlat.runtime import version
from hlat.runtime.urls import redact
from hlat.runtime.version import install_command
from tests.support.pages import ROOT

FOLDER = "file:///home/me/my%20hlat"
WHEEL: dict[str, Any] = {"url": "https://me:secret@host/hlat-0.1.0-py3-none-any.whl", "archive_info": {}}
GIT = {"url": "https://host/hlat.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}


class Installed:
    """hlat's metadata as pip leaves them."""

    requires = distribution("hlat").requires

    def __init__(self, origin: Any) -> None:
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.origin is None else json.dumps(self.origin)


@pytest.mark.parametrize(
    ("origin", "extras", "command"),
    [
        ({"url": FOLDER, "dir_info": {"editable": True}}, ("eval",), "pip install -e '/home/me/my hlat[eval]'"),
        ({"url": FOLDER, "dir_info": {}}, ("wandb", "trackio"), "pip install '/home/me/my hlat[wandb,trackio]'"),
        (WHEEL, ("eval",), f"pip install 'hlat[eval] @ {redact(WHEEL['url'])}'"),
        (GIT, ("s3",), "pip install 'hlat[s3] @ git+https://host/hlat.git@abc'"),
        (None, ("eval",), "pip install lm-eval==0.4.13"),
        (None, ("mlflow",), "pip install 'alembic>=1.13' 'mlflow-skinny>=3.17' 'sqlalchemy>=2.0'"),
    ],
)
def test_the_command(origin: Any, extras: tuple[str, ...], command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "distribution", lambda name: Installed(origin))
    assert sorted(install_command(*extras).split()) == sorted(command.split())


def test_no_message_or_page_names_a_package_of_an_index() -> None:
    """Hlat is on none; whoever took the name there would get its users."""
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py"), ROOT / "README.md"]
    assert [page for page in pages if "install 'hlat[" in page.read_text(encoding="utf-8")] == []
