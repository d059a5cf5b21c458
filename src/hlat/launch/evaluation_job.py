"""An evaluation job: tasks to run on a model, in this process or in processes that this one starts.

    EvaluationJob --evaluate_here--> hlat.evaluation.harness in this process --> SuiteReport
                  --arguments------> the command ``hlat evaluate`` with the same options, in each process

``hlat evaluate --tasks`` and ``hlat.evaluate_tasks`` both are this.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hlat.runtime.errors import LaunchError

if TYPE_CHECKING:
    from hlat.evaluation import Suite, SuiteReport


DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class EvaluationJob:
    """Tasks to run on a model. Each field is an option of ``hlat evaluate``, under the same name."""

    checkpoint: str  # a checkpoint, a checkpoints folder or a run folder; or a Hugging Face folder
    tasks: str | None = None  # names of tasks of lm-eval, separated by commas; None for a suite
    suite: str | None = None  # name or file of a suite; None for tasks
    to: str | None = None  # folder of the results; None for evaluation/NAME, after the name of the checkpoint
    files: str | None = None  # folder of the suite's data files
    include: str | None = None  # folder with further tasks
    shots: int | None = None  # solved examples in front of each question, for tasks; None for the tasks' own number
    limit: int | None = None  # most samples of each task; None for all
    seed: int = 1234  # seed of the choice of examples, and of sampled texts
    max_length: int | None = None  # most tokens of context and continuation; None for the model's maximum
    max_tokens: int | None = None  # most tokens of a generated text; None for what the tasks say
    # execute code that the model writes, in a sandbox; "unsafe": without one
    allow_code_execution: bool | Literal["unsafe"] = False
    weights: str = "model"  # model, or ema for the average of the weights
    dtype: str = "auto"  # one of DTYPES; auto is that of the stored weights
    tensor: int = 1  # tensor-parallel degree; the other processes are data-parallel replicas
    batch_tokens: int = 2048  # most tokens of a forward pass
    batch_rows: int = 64  # most texts that are generated together

    @property
    def folder(self) -> Path:
        return Path(self.to) if self.to is not None else Path("evaluation") / Path(self.checkpoint).resolve().name

    def arguments(self) -> list[str]:
        """Arguments of the command that runs this job as one process."""
        words = ["evaluate", self.checkpoint]
        for each in fields(self)[1:]:  # the first one, the checkpoint, has no option
            value, option = getattr(self, each.name), f"--{each.name.replace('_', '-')}"
            if value != each.default:
                words.append(option if value is True else f"{option}={value}")
        return words

    def load_suite(self) -> "Suite":
        """Load the suite, or make one of the tasks.

        Raises:
            LaunchError: both or neither are named, or another option does not fit.
            DataError: there is no such suite, or its file has mistakes.
        """
        from hlat.evaluation import load_suite, suite_of_tasks  # noqa: PLC0415  (the launcher stays small)

        if (self.tasks is None) == (self.suite is None):
            raise LaunchError("name tasks or a suite: --tasks a,b or --suite hlat.")
        if self.dtype not in DTYPES:
            raise LaunchError(f"--dtype {self.dtype}: expected one of {', '.join(DTYPES)}.")
        if self.allow_code_execution not in (False, True, "unsafe"):
            raise LaunchError(f"--allow-code-execution={self.allow_code_execution}: the only value is unsafe.")
        if self.suite is not None and self.shots is not None:
            raise LaunchError(f"--shots: suite {self.suite} says how many each of its tasks has. Use --tasks instead.")
        if self.suite is not None:
            return load_suite(self.suite)
        names = [name.strip() for name in (self.tasks or "").split(",") if name.strip()]
        if not names:
            raise LaunchError("--tasks is empty: name tasks of lm-eval, separated by commas.")
        return suite_of_tasks(list(dict.fromkeys(names)), self.shots)  # a task that is named twice is run once

    def render(self, to: Path) -> int:
        """Write the requests of the tasks to a file for ``evaluation.tasks``; return their number.

        Raises:
            LaunchError: as for ``load_suite``.
            DataError: tasks, data files or downloads are missing, or a task cannot be rendered.
            StorageError: the file cannot be written.
        """
        from hlat.evaluation import render_suite  # noqa: PLC0415
        from hlat.training import write_requests  # noqa: PLC0415

        files = None if self.files is None else Path(self.files)
        include = () if self.include is None else (Path(self.include),)
        requests = render_suite(self.load_suite(), files, include, self.limit, self.seed)
        write_requests(to, requests)
        return len(requests)

    def evaluate_here(self, suite: "Suite", progress: Callable[[str, int, int], None]) -> "SuiteReport | None":
        """Evaluate in this process, which may be one of several; return the report on rank 0, None on others.

        Args:
            suite: the suite of this job.
            progress: called on rank 0 with the name of the work, how much is done, and how much there is.
        """
        import torch  # noqa: PLC0415

        from hlat.evaluation import (  # noqa: PLC0415
            BatchLimits,
            GenerationLimits,
            ServingOptions,
            SuiteOptions,
            run_suite,
        )
        from hlat.runtime.distributed.join import joined_run  # noqa: PLC0415

        serving = ServingOptions(
            self.weights,
            None if self.dtype == "auto" else getattr(torch, self.dtype),
            self.tensor,
            BatchLimits(tokens=self.batch_tokens, cached=16 * self.batch_tokens),
            GenerationLimits(rows=self.batch_rows, cached=1024 * self.batch_rows),
        )
        options = SuiteOptions(
            self.folder,
            None if self.files is None else Path(self.files),
            () if self.include is None else (Path(self.include),),
            self.limit,
            self.seed,
            self.max_length,
            self.max_tokens,
            self.allow_code_execution,
            serving,
        )
        with joined_run() as runtime:
            return run_suite(self.checkpoint, suite, options, runtime, progress)
