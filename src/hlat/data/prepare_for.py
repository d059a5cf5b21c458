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

    Args:
        recipe: the recipe.
        workers: number of tokenizing processes; None for data.workers, which defaults to one per core. Used only in
            the mode "prepared".
        progress: see ``hlat.data.prepare.corpus.ProgressCallback``.

    Returns:
        The prepared data. In the mode "online" it has the tokenizer, the validation tokens and the block index.

    Raises:
        DataError: the corpus or tokenizer cannot be used, or the folder contains other data.
        StorageError: the disk refused the write.
    """
    data = recipe.data
    if data.mode == "prepared":
        return prepare(data, recipe.prepared_dir, workers=workers, progress=progress)
    sequences = recipe.evaluation.sequences
    validation_tokens = None if sequences is None else sequences * data.sequence_length + 1
    return prepare_online(data, recipe.prepared_dir, validation_tokens, progress)


def prepare_validation_sets(
    recipe: Recipe, prepared: PreparedData, *, progress: ProgressCallback | None = None
) -> None:
    """Prepare the sets of ``evaluation.sets`` in the run's folder; return at once if this has been done before.

    Args:
        recipe: the recipe.
        prepared: the run's data, whose tokenizer and columns the sets share.
        progress: see ``hlat.data.prepare.corpus.ProgressCallback``.

    Raises:
        DataError: a set cannot be used, or its folder contains other data.
        StorageError: the disk refused the write.
    """
    model = prepared.tokenizer_dir / "tokenizer.model"
    tokenizer = str(model if model.is_file() else prepared.tokenizer_dir)
    for name, path in recipe.evaluation.sets.items():
        data = DataConfig.model_validate(
            {
                "path": path,
                "text_column": recipe.data.text_column,
                "tokens_column": recipe.data.tokens_column,
                "tokenizer": {"path": tokenizer, "eos_token": prepared.tokenizer.eos_token},
                "validation": {"fraction": 0},
                "sequence_length": recipe.data.sequence_length,
            }
        )
        prepare(data, _set_folder(recipe, name), workers=1, progress=progress)


def open_validation_sets(recipe: Recipe, *, compare: bool = True) -> dict[str, PreparedData]:
    """Open the sets of ``evaluation.sets`` that are prepared, by name. All of a set is in its training split.

    Args:
        recipe: the recipe.
        compare: compare their shards with their checksums, unless they are large; one process of each machine does.

    Raises:
        DataError: a set is missing or damaged.
    """
    folders = {name: _set_folder(recipe, name) for name in recipe.evaluation.sets}
    opened = {name: open_prepared(folder).for_run(folder) for name, folder in folders.items()}
    for prepared in opened.values() if compare else ():
        prepared.check_before_training()
    return opened


def _set_folder(recipe: Recipe, name: str) -> Path:
    return recipe.run_dir / "validation" / name
