"""Compile jobs: the code of a run, compiled before it starts in as many processes as it will have on this machine.

CompileJob --compile_here--> graphs of one process, in the folder that the recipe names
           --fill--> processes, each of them the command ``hlat compile`` --> cache of this machine, archive
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hlat.config import Recipe
from hlat.launch.supervision.incidents import RunOutcome
from hlat.launch.supervision.local_run import run_processes
from hlat.planner import load_run_recipe, resolve_defaults
from hlat.runtime.errors import LaunchError

if TYPE_CHECKING:
    from hlat.compilation import CompiledCache


class ProcessesFailed(Exception):
    """The processes that were to compile have ended without doing so; ``outcome`` has exit code and message."""

    def __init__(self, outcome: RunOutcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


@dataclass(frozen=True)
class CompileJob:
    """A recipe whose graphs are to be compiled."""

    recipe: str  # recipe file, or the name of a shipped recipe
    overrides: tuple[str, ...] = ()  # a.b=c each

    def load(self, world: int | None) -> Recipe:
        """Load the recipe as written for ``world`` processes, None for any number; RecipeError lists its problems."""
        return load_run_recipe(self.recipe, self.overrides, world=world)

    def arguments(self) -> list[str]:
        """Arguments of the command that compiles as one process of several."""
        return ["compile", self.recipe, *self.overrides]

    def compile_here(self) -> None:
        """Compile in this process, which may be one of several, into the folder that the recipe names.

        Raises:
            LaunchError: the run compiles nothing, or cannot run here.
        """
        from hlat.compilation import compile_graphs  # noqa: PLC0415  (imports torch)
        from hlat.runtime.distributed.join import joined_run  # noqa: PLC0415
        from hlat.runtime.distributed.network import RUN_SECRET_ENV  # noqa: PLC0415
        from hlat.runtime.process import rank_info  # noqa: PLC0415
        from hlat.training import configure_rounding  # noqa: PLC0415

        recipe, _ = resolve_defaults(self.load(rank_info().world), rank_info().world)
        run = recipe.run
        configure_rounding(recipe, rank_info())
        folder = None
        if rank_info().world > 1 and RUN_SECRET_ENV not in os.environ:  # under torchrun or srun: there they meet
            folder = recipe.run_dir
            folder.mkdir(parents=True, exist_ok=True)
        with joined_run(run.device, run.determinism is not False, folder, run.compile_cache) as runtime:
            compile_graphs(recipe, runtime)

    def fill(
        self,
        nproc: int,
        out: Path | None = None,
        work: "Callable[[CompileJob], None] | None" = None,
        show: Callable[[str], None] | None = None,
    ) -> "CompiledCache":
        """Compile everything anew, fill the cache of this machine with it, and pack it.

        Args:
            nproc: processes of the run on this machine.
            out: archive to write; None for none.
            work: compiles a single process's job; for a process that has compiled nothing yet. None starts processes.
            show: receives the lines that processes print; None leaves them on the streams of this process.

        Raises:
            ProcessesFailed: the processes have failed or were stopped.
            LaunchError: the run compiles nothing, or cannot run here.
            StorageError: the cache or the archive cannot be written.
        """
        from hlat.compilation import (  # noqa: PLC0415
            CompiledCache,
            check_archive_path,
            compiled_files,
            pack,
            place,
            working_folder,
        )

        recipe = self.load(nproc)
        if out is not None:
            # before minutes of compiling
            check_archive_path(out)
        device_type, base = _device_type(recipe), recipe.run.compile_cache
        with working_folder(device_type, base) as folder:
            job = replace(self, overrides=(*self.overrides, f"run.compile_cache={json.dumps(str(folder))}"))
            if nproc == 1 and work is not None:
                work(job)
            else:
                outcome = run_processes(job.arguments(), nproc, folder, show)
                if outcome.exit_code:
                    raise ProcessesFailed(outcome)
            files = compiled_files(folder)
            versions = _versions(device_type)
            size = sum(file.stat().st_size for file in files.values())
            # A cache without files would make every start of a run a cold one, and nobody would know why: this is found
            # before the archive and the cache of this machine are replaced.
            if not files:
                raise LaunchError(
                    f"the compilers of {device_type} devices have left nothing in the folders that hlat gave them: "
                    "their cache is switched off by a variable of the environment, or they keep it elsewhere."
                )
            if out is not None:
                pack(out, device_type, versions, nproc, files)
            place(files, device_type, base)
        return CompiledCache(device_type, versions, nproc, len(files), size, out)

    def unpack(self, archive: Path) -> "CompiledCache":
        """Fill the cache from an archive; LaunchError if it is damaged, or for other devices or versions."""
        from hlat.compilation import unpack  # noqa: PLC0415

        recipe = self.load(None)
        device_type = _device_type(recipe)
        return unpack(archive, device_type, _versions(device_type), recipe.run.compile_cache)


def is_worker() -> bool:
    """Return True if this process is one of several of a run, which compiles and does nothing else."""
    return "WORLD_SIZE" in os.environ


def _device_type(recipe: Recipe) -> str:
    from hlat.runtime.backend.device import find_device_type  # noqa: PLC0415

    return find_device_type(recipe.run.device)


def _versions(device_type: str) -> dict[str, str]:
    import torch  # noqa: PLC0415

    from hlat.runtime.backend.table import backend_of  # noqa: PLC0415

    return backend_of(device_type).compiler_versions(torch.device(device_type))
