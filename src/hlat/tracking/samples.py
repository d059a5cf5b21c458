"""samples.jsonl: texts that the model generated, a line of step, prompt and text for each."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hlat.tracking.events import EventLog, read_events

SAMPLES_NAME = "samples.jsonl"
"""Name of the file in the folder of a run."""


@dataclass(frozen=True)
class GeneratedText:
    """Text that the model generated at a step."""

    step: int
    prompt: str
    text: str


def append_samples(folder: Path, step: int, samples: Iterable[tuple[str, str]]) -> None:
    """Add generated texts to the file in a run's folder.

    Args:
        folder: folder of the run.
        step: optimizer steps done.
        samples: prompts, each with its new text.

    Raises:
        StorageError: the file cannot be written.
    """
    log = EventLog(folder / SAMPLES_NAME)
    try:
        for prompt, text in samples:
            log.append("sample", step=step, prompt=prompt, text=text)
    finally:
        log.close()


def read_samples(folder: Path) -> list[GeneratedText]:
    """Return the generated texts of a run, by step; of a step that was repeated, the last ones.

    Raises:
        DataError: a line other than the last is damaged.
        StorageError: the file cannot be read.
    """
    path = folder / SAMPLES_NAME
    newest = {(sample.step, sample.prompt): sample for sample in _parse(path)} if path.is_file() else {}
    return sorted(newest.values(), key=lambda sample: sample.step)


def _parse(path: Path) -> Iterator[GeneratedText]:
    for record in read_events(path):
        step, prompt, text = (record.get(key) for key in ("step", "prompt", "text"))
        if isinstance(step, int) and isinstance(prompt, str) and isinstance(text, str):
            yield GeneratedText(step, prompt, text)
