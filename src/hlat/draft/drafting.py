"""Draft a recipe.

corpus, machine, hours, model or none --> texts, machine, sizes --> text of a recipe --load--> checked
"""

import tempfile
from pathlib import Path

from hlat.config import PRESETS, ModelConfig, load_recipe, model_section
from hlat.data import Tokenizer, load_tokenizer
from hlat.draft.document import recipe_text
from hlat.draft.machine import look_at_machine
from hlat.draft.sizes import choose_sizes, vocabulary_for
from hlat.draft.texts import look_at_texts


def draft_recipe(
    path: str,
    *,
    name: str,
    hours: float = 1.0,
    column: str | None = None,
    start: str | None = None,
    model: str | None = None,
    device: str = "auto",
) -> str:
    """Draft a recipe for a corpus and this machine.

    Args:
        path: the corpus: a file, folder or glob.
        name: name of the run.
        hours: time to train.
        column: column or key of the text; None tries the usual names.
        start: model to continue from, as ``model.from`` takes it; None trains a new one.
        model: preset or config.json of a new model; None chooses the size.
        device: as ``run.device`` takes it.

    Returns:
        The text of the recipe, which ``load_recipe`` has accepted.

    Raises:
        RecipeError: there is no such model, or hlat does not support it.
        DataError: the corpus or the tokenizer cannot be used.
        LaunchError: there is no such device.
    """
    texts = look_at_texts(path, column)
    given, tokenizer = _given(path, start, model)
    machine = look_at_machine(device)
    vocab_size = given.vocab_size if given is not None else vocabulary_for(texts.text_bytes)
    epoch = texts.tokens(vocab_size, tokenizer)
    sizes = choose_sizes(texts, epoch, machine, hours, given, trained=start is not None)
    line = {"from": start} if start is not None else {} if model is None else {_field(model): model}
    text = recipe_text(name, texts, machine, sizes, line, hours)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(text, encoding="utf-8")
        load_recipe(file, world=machine.devices)
    return text


def _given(path: str, start: str | None, model: str | None) -> tuple[ModelConfig | None, Tokenizer | None]:
    """The model that is given, and its tokenizer; None for what is to be made."""
    if start is None:
        return (None if model is None else model_section(model)), None
    with tempfile.TemporaryDirectory() as folder:  # resolved as the recipe will be
        file = Path(folder) / "recipe.yaml"
        file.write_text("{data: {sequence_length: 8}, training: {steps: 1}, batch: {global_batch: 1}}")
        found = load_recipe(file, [f"model.from={start}", f"data.path={path}"])
    tokenizer = found.data.tokenizer
    return found.model, None if tokenizer.path is None else load_tokenizer(tokenizer.path, tokenizer.eos_token)


def _field(model: str) -> str:
    return "preset" if model in PRESETS else "hf_config"
