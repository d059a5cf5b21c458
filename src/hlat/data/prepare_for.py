"""Prepare the data of a recipe for training: all of its tokens, or only the parts that online tokenization needs."""

from hlat.config import Recipe
from hlat.data.online import prepare_online
from hlat.data.prepare import ProgressCallback, prepare
from hlat.data.prepared import PreparedData


def prepare_recipe_data(
    recipe: Recipe, *, workers: int | None = None, progress: ProgressCallback | None = None
) -> PreparedData:
    """Prepare the data of a recipe in its data.mode; return at once if this has been done before.

    Args:
        recipe: the recipe.
        workers: number of tokenizing processes; None for data.workers, which defaults to one per core. Used only in
            the mode "prepared".
        progress: see ``hlat.data.prepare.ProgressCallback``.

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
