"""Prepare the data of a recipe, all of its tokens or the parts that online tokenization needs; and validation sets."""

from pathlib import Path

from hlat.config import DataConfig, Recipe
from hlat.data.online.prepare import prepare_online
from hlat.data.prepare.corpus import ProgressCallback
from hlat.data.prepare.preparation import prepare
from hlat.data.prepared.prepared_folder import PreparedData, open_prepared


def prepare_recipe_data(
    recipe: Recipe, *, workers: int | None = None, progress: ProgressCallback | None = None
) -> PreparedData:
    """Prepare the data of a recipe in its data.mode; return at once if this has been done before.

    ``workers`` counts for the mode "prepared" only; None for data.workers, or one per core. In the mode "online" the
    result has the tokenizer, the validation tokens and the block index. DataError if the corpus or tokenizer cannot be
    used or the folder contains other data, StorageError if the disk refuses.
    """
    data = recipe.data
    if data.mode == "prepared":
        return prepare(data, recipe.prepared_dir, workers=workers, progress=progress)
    sequences = recipe.evaluation.sequences
    # One more, the label of the last input.
    validation_tokens = None if sequences is None else sequences * data.sequence_length + 1
    return prepare_online(data, recipe.prepared_dir, validation_tokens, progress)


def prepare_validation_sets(
    recipe: Recipe, prepared: PreparedData, *, progress: ProgressCallback | None = None
) -> None:
    """Prepare the sets of ``evaluation.sets`` in the run's folder; return at once if this has been done before.

    They share the tokenizer and the columns of ``prepared``. DataError if a set cannot be used or its folder contains
    other data, StorageError if the disk refused the write.
    """
    model = prepared.tokenizer_dir / "tokenizer.model"  # as ``load_saved``, which prefers the model
    tokenizer = str(model if model.is_file() else prepared.tokenizer_dir)
    for name, path in recipe.evaluation.sets.items():
        data = DataConfig.model_validate(
            {
                "path": path,
                "text_column": recipe.data.text_column,
                "tokens_column": recipe.data.tokens_column,
                "tokenizer": {"path": tokenizer, "eos_token": prepared.tokenizer.eos_token},
                "validation": {"fraction": 0},  # all of a set is in its training split
                "sequence_length": recipe.data.sequence_length,
            }
        )
        prepare(data, _set_folder(recipe, name), workers=1, progress=progress)


def open_validation_sets(recipe: Recipe, *, compare: bool = True) -> dict[str, PreparedData]:
    """Open the prepared sets of ``evaluation.sets``, by name; DataError if one is missing or damaged."""
    folders = {name: _set_folder(recipe, name) for name in recipe.evaluation.sets}
    opened = {name: open_prepared(folder).for_run(folder) for name, folder in folders.items()}
    # One process of each machine compares checksums: all would read the same files.
    for prepared in opened.values() if compare else ():
        prepared.check_before_training()
    return opened


def _set_folder(recipe: Recipe, name: str) -> Path:
    return recipe.run_dir / "validation" / name
