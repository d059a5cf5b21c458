"""Compiled code of a run, before the run starts."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hlat.api.arguments import checks_arguments
from hlat.api.outcomes import outcome_error
from hlat.api.recipes import Overrides, recipe_job
from hlat.api.settings import restored
from hlat.config import Recipe
from hlat.launch import CompileJob, ProcessesFailed, refuse_worker

if TYPE_CHECKING:
    from hlat.compilation import CompiledCache

_LOG = logging.getLogger("hlat")


@checks_arguments
def compile_cache(
    recipe: Recipe | str | Path, overrides: Overrides = (), *, nproc: int = 1, out: str | Path | None = None
) -> "CompiledCache":
    """Compile the code of a run before it starts, in processes of their own, and fill the cache of this machine.

    Args:
        recipe: a recipe, a recipe file, or the name of a shipped recipe.
        overrides: changes of the recipe, if it is a file or a name.
        nproc: processes of the run on this machine.
        out: archive to write, for other machines like this one; None for none.

    Returns:
        ``files``, ``size`` in bytes, ``versions`` that the code depends on, ``device_type``, ``world``, ``archive``.

    Raises:
        RecipeError: the recipe has problems, or does not fit the number of processes.
        LaunchError: the run compiles nothing, or cannot run here.
        StorageError: the cache or the archive cannot be written.
    """
    refuse_worker(nproc)
    with restored(), recipe_job(recipe, overrides) as job:
        if nproc == 1:  # as in ``train``, which computes in this process
            import torch

            os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
        try:
            return CompileJob(job.recipe, job.overrides).fill(nproc, _path(out), show=_LOG.info)
        except ProcessesFailed as failed:
            raise outcome_error(failed.outcome) from failed


@checks_arguments
def unpack_cache(recipe: Recipe | str | Path, archive: str | Path, overrides: Overrides = ()) -> "CompiledCache":
    """Fill the cache of this machine from an archive of ``compile_cache``.

    The whole archive is checked before any file is placed. Compilers load code from their cache: unpack only archives
    of people whose programs you would run.

    Args:
        recipe: as for ``compile_cache``; it names the device and the folder of the cache.
        archive: the archive.
        overrides: as for ``compile_cache``.

    Raises:
        RecipeError: the recipe has problems.
        LaunchError: the archive is damaged, or for other devices or versions of compilers.
        StorageError: it cannot be read, or the cache cannot be written.
    """
    with restored(), recipe_job(recipe, overrides) as job:
        return CompileJob(job.recipe, job.overrides).unpack(Path(archive))


def _path(name: str | Path | None) -> Path | None:
    return None if name is None else Path(name)
