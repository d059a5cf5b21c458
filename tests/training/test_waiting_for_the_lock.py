"""A run that waits for the previous one in its folder says so, wherever its console is."""

import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml

from hlat.config.load import parse_recipe
from hlat.training import loop


@pytest.mark.parametrize("stream", [None, io.StringIO()], ids=["standard output", "a stream"])
def test_the_message_goes_to_the_console(
    tiny_recipe: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stream: io.StringIO | None,
) -> None:
    @contextmanager
    def waits(run_dir: Path, say: Callable[[str], None]) -> Iterator[int]:
        say(f"{run_dir}: waiting")
        yield 3

    monkeypatch.setattr(loop, "run_lock", waits)
    content = yaml.safe_load(tiny_recipe)
    content["run"]["dir"] = content["data"]["path"] = str(tmp_path)
    recipe = parse_recipe(content)
    with ExitStack() as stack:
        assert loop._take_lock(stack, recipe, stream) == 3
    printed = capsys.readouterr().out if stream is None else stream.getvalue()
    assert printed == f"{tmp_path}: waiting\n"
