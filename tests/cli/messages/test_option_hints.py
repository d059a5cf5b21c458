"""Options of other programs: what they are at the verb that was given, and nothing if that verb has no such thing."""

import pytest
import typer

from hlat.cli import app


def message_of(words: str) -> str:
    with pytest.raises(Exception, match="No such option") as caught:
        typer.main.get_command(app).main(words.split(), standalone_mode=False)
    return str(caught.value.message)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train r --gpus 2", "Here it is --nproc"),
        ("train r --num-nodes 2", "Here it is --nodes"),
        ("train r --dp 2", "Here it is --nproc: what is left of the processes shares the batch"),
        ("check r --gpus 2", "Here it is --nproc"),
        ("rehearse r --gpus 2", "Here it is --world"),
        ("launch slurm r --gpus 2", "Here it is --nproc"),
    ],
)
def test_the_option_of_the_verb(words: str, says: str) -> None:
    assert message_of(words).endswith(f". {says}")


@pytest.mark.parametrize(
    "words",
    [
        "evaluate r --num-nodes 2",
        "compile r --num-nodes 2",
        "sweep r --num-nodes 2",
        "launch status r --gpus 2",
        "plan --gpus 2",
    ],
)
def test_no_option_that_the_verb_lacks(words: str) -> None:
    assert "Here it is" not in message_of(words)
