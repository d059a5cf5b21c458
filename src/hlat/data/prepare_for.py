"""What a recipe needs before it can train: everything tokenized, or what is needed besides the text."""

from hlat.config import Recipe
from hlat.data.online import prepare_online
from hlat.data.prepare import Progress, prepare
from hlat.data.prepared import PreparedData


def prepare_recipe_data(
    recipe: Recipe, *, workers: int | None = None, progress: Progress | None = None
) -> PreparedData:
    """Prepare a recipe's data in the mode that it says; returns at once if that has been done.

    Args:
        recipe: the recipe.
        workers: processes that tokenize; None for data.workers, and for that one per core.
        progress: see Progress.

    Raises:
        DataError: a corpus or tokenizer that cannot be used, or a folder that holds other data.
        StorageError: the disk refused.
    """
    data = recipe.data
    if data.mode == "prepared":
        return prepare(data, recipe.prepared_dir, workers=workers, progress=progress)
    sequences = recipe.evaluation.sequences
    wanted = None if sequences is None else sequences * data.sequence_length + 1
    return prepare_online(data, recipe.prepared_dir, wanted, progress)
