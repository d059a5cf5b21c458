"""The Python API: one function per verb of the command line (docs/python.md).

    load_recipe -> train -> evaluate, generate, load_model, metrics        plan, rehearse

Nothing is printed: progress and messages are log records of the logger ``hlat``. Mistakes are ``HlatError``s. What
computing needs in a process (environment variables, settings of torch, random generators, signal handlers) is restored
when a function returns or raises.
"""

import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hlat.config import Recipe
from hlat.config import load_recipe as read_recipe
from hlat.launch import RunOutcome, SupervisionOptions, TrainingJob, parse_nproc, refuse_worker, supervise_job
from hlat.runtime import CheckpointError, HlatError, LaunchError, error_class

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

    from hlat.evaluation import Perplexity
    from hlat.model import Decoder
    from hlat.planner.report import ClusterComparison
    from hlat.planner.search import TrainingPlan
    from hlat.rehearsal import RankReport, Rehearsal

_LOG = logging.getLogger("hlat")
_LOG.addHandler(logging.NullHandler())  # quiet unless the program configures logging

Overrides = Sequence[str] | Mapping[str, object]
"""Changes of a recipe: ``["training.steps=100"]``, or ``{"training.steps": 100}``."""


@dataclass(frozen=True)
class TrainingResult:
    """Result of ``train``.

    Attributes:
        step: optimizer steps done.
        total_steps: optimizer steps of the recipe.
        reason: why training ended: "finished", "stop_after", "deadline", or the name of a signal, such as "SIGINT".
        loss: training loss of the last logged step, nats per token; None if no step was logged.
        validation_loss: validation loss of the last step, nats per token; None if that step did not validate.
        validation_bits_per_byte: the same in bits per byte of text.
        checkpoint: the newest checkpoint; None if training was stopped before its first step.
        run_dir: folder of the run.
    """

    step: int
    total_steps: int
    reason: str
    loss: float | None
    validation_loss: float | None
    validation_bits_per_byte: float | None
    checkpoint: Path | None
    run_dir: Path

    @property
    def finished(self) -> bool:
        """True if all steps of the recipe are done."""
        return self.step >= self.total_steps


def load_recipe(path: str | Path, overrides: Overrides = (), *, world: int | None = None) -> Recipe:
    """Load a recipe and check it.

    Args:
        path: recipe file, or the name of a shipped recipe.
        overrides: changes, as ``["training.steps=100"]`` or ``{"training.steps": 100}``.
        world: number of processes that the layout must fit; None checks only that some number fits.

    Returns:
        The recipe, with all defaults filled in. It cannot be changed; load it again with other overrides.

    Raises:
        RecipeError: with every problem of file, overrides and fields (``problems``).
    """
    return read_recipe(path, _words(overrides), world=world)


def train(
    recipe: Recipe | str | Path,
    overrides: Overrides = (),
    *,
    nproc: int | str = 1,
    profile: bool = False,
    allow_faults: bool = False,
    require_step: int | None = None,
) -> TrainingResult:
    """Train a recipe, or resume its run: the newest valid checkpoint in its folder is loaded.

    Ctrl-C (SIGINT) and SIGTERM, SIGHUP and SIGUSR1 stop after the present step, save a checkpoint and return, with the
    name of the signal as ``reason``; a second Ctrl-C raises KeyboardInterrupt at once. Python delivers signals to the
    main thread only: called from another thread, ``train`` does not stop on them.

    Args:
        recipe: a recipe, a recipe file, or the name of a shipped recipe.
        overrides: changes of the recipe, if it is a file or a name.
        nproc: 1 trains in this process, without restarts after failures. A larger number starts that many processes
            on this machine, supervised as by ``hlat train --nproc``; "MIN:MAX" goes on with fewer if one is lost.
        profile: write a trace of steps 4 to 6 and a table of their time to the run's folder.
        allow_faults: inject the faults that the recipe lists; without it such a recipe is refused.
        require_step: resume from this step; fail unless it is the newest checkpoint.

    Raises:
        RecipeError: the recipe has problems, or does not fit the number of processes.
        HlatError: the run cannot start or continue; the subclass and the message say why and what would work.
    """
    least, most = parse_nproc(nproc)
    with _job(recipe, overrides, profile, allow_faults, require_step) as job:
        if most > 1:
            refuse_worker(nproc)
            return _train_supervised(job, least, most)
        return _train_here(job)


def plan(
    model: str | Path,
    cluster: str,
    *,
    tokens: int | None = None,
    sequence: int | None = None,
    global_batch: int | None = None,
    precision: str | None = None,
    price: str | None = None,
    layout: str | None = None,
    hardware: str | Path | None = None,
) -> "TrainingPlan":
    """Choose the layout of a run on a cluster, and predict its time, memory, cost and goodput.

    Args:
        model: a preset, a config.json or its folder, a recipe file, or the name of a shipped recipe.
        cluster: INSTANCE:N, as in "trn1.32xlarge:64".
        tokens: tokens of the whole run; None for the recipe's, or 20 per parameter.
        sequence: tokens per sequence; None for the recipe's, or the model's maximum up to 8,192.
        global_batch: sequences per step; None for the recipe's, or about 4 million tokens.
        precision: precision mode; None for the recipe's, or "auto".
        price: kind of price: "on-demand", "capacity-block", "reserved", "spot" or "own"; None for the first known one.
        layout: layout to predict, as in "tp=8,pp=1,zero=1"; None searches for the best one.
        hardware: file with a catalog of chips and instances, on top of the one that ships with hlat.

    Returns:
        The plan: ``chosen`` and ``alternatives`` (each with ``candidate``, ``step_seconds``, ``peak_memory`` in bytes,
        ``days``, ``cost_usd``, ``mfu``, ``goodput``), ``request``, and ``to_dict()`` with everything as JSON values.

    Raises:
        PlanError: nothing fits, or an argument is wrong; the message suggests what would work.
        HardwareError: the cluster is unknown, or the catalog is inconsistent.
        RecipeError: the recipe or config.json has mistakes.
    """
    found = compare_plans(
        model,
        [cluster],
        tokens=tokens,
        sequence=sequence,
        global_batch=global_batch,
        precision=precision,
        price=price,
        layout=layout,
        hardware=hardware,
    )
    return found.plans[0]


def compare_plans(
    model: str | Path,
    clusters: Sequence[str],
    *,
    tokens: int | None = None,
    sequence: int | None = None,
    global_batch: int | None = None,
    precision: str | None = None,
    price: str | None = None,
    rank_by: str | None = None,
    layout: str | None = None,
    against: str | None = None,
    hardware: str | Path | None = None,
) -> "ClusterComparison":
    """Plan a run on each of several clusters; ``plan`` explains the arguments that both have.

    Args:
        model: as for ``plan``.
        clusters: INSTANCE:N each.
        tokens: as for ``plan``.
        sequence: as for ``plan``.
        global_batch: as for ``plan``.
        precision: as for ``plan``.
        price: as for ``plan``; None for the first kind that all clusters have.
        rank_by: "time" or "cost" orders the plans; None keeps the order of ``clusters``.
        layout: as for ``plan``.
        against: another layout whose prediction is to be compared.
        hardware: as for ``plan``.

    Returns:
        ``plans``, ``refused`` (the reason, by cluster without a plan), ``against`` (a prediction by cluster), and
        ``to_dict()`` with everything as JSON values.

    Raises:
        PlanError: no cluster can be planned for, or an argument is wrong.
        HardwareError: a cluster is unknown, or the catalog is inconsistent.
        RecipeError: the recipe or config.json has mistakes.
    """
    from hlat.planner.report import compare_clusters

    return compare_clusters(
        str(model),
        clusters,
        tokens=tokens,
        sequence=sequence,
        global_batch=global_batch,
        precision=precision,
        price=price,
        rank_by=rank_by,
        layout=layout,
        against=against,
        hardware=None if hardware is None else Path(hardware),
    )


def rehearse(
    recipe: Recipe | str | Path,
    overrides: Overrides = (),
    *,
    world: int = 1,
    ranks: Sequence[int] | None = None,
    processes: int = 1,
    on_report: "Callable[[RankReport], None] | None" = None,
) -> "Rehearsal":
    """Run a training step of some ranks on this machine, on tensors that take no memory.

    Args:
        recipe: a recipe, a recipe file, or the name of a shipped recipe.
        overrides: changes of the recipe, if it is a file or a name.
        world: world size of the run: one process per accelerator.
        ranks: ranks to rehearse; None for the first, the middle, the last and the one that needs most memory.
        processes: processes of this machine to use. More than 1 start new interpreters, which import the program's
            main module: a script then needs ``if __name__ == "__main__":``.
        on_report: called with the report of each rank as soon as there is one.

    Returns:
        ``ranks``: a report for each, with ``peak_bytes``, ``messages``, ``flops`` and others; ``layout``; and
        ``to_dict()`` with everything as JSON values.

    Raises:
        RecipeError: every problem of the recipe, also those that only a rank finds.
        LaunchError: there is no such rank, or the recipe needs something that cannot be rehearsed on a CPU.
    """
    with _restored(), _job(recipe, overrides) as job:
        from hlat.rehearsal import rehearse as rehearse_world

        show = on_report or (lambda report: None)
        return rehearse_world(job.load(world), world, ranks, processes=processes, on_report=show)


def evaluate(checkpoint: str | Path, data: str | Path | None = None, *, weights: str = "model") -> "Perplexity":
    """Evaluate a checkpoint on its complete validation split.

    Args:
        checkpoint: a checkpoint, a checkpoints folder or a run folder.
        data: folder of prepared data; None for that of the run.
        weights: "model", or "ema" for the average of the weights, if the run keeps one.

    Returns:
        ``loss`` (nats per token), ``perplexity``, ``bits_per_byte`` and ``tokens``.

    Raises:
        CheckpointError: there is no valid checkpoint.
        DataError: there is no prepared data, or it does not fit the checkpoint, or is damaged.
    """
    with _restored():
        from hlat.evaluation import evaluate_checkpoint

        return evaluate_checkpoint(checkpoint, data, weights)


def generate(
    checkpoint: str | Path,
    prompt: str,
    *,
    max_tokens: int = 100,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    weights: str = "model",
) -> str:
    """Continue a text.

    Args:
        checkpoint: a checkpoint, a checkpoints folder or a run folder.
        prompt: text to continue.
        max_tokens: most tokens to generate; fewer if the context is full or the text ends.
        temperature: sampling temperature; 0 is greedy.
        top_k: sample from the k most likely tokens.
        top_p: sample from the smallest set of tokens with total probability p.
        seed: seed of the sampling.
        weights: "model", or "ema" for the average of the weights, if the run keeps one.

    Returns:
        The continuation, without the prompt.

    Raises:
        CheckpointError: there is no valid checkpoint, or it has no tokenizer.
        DataError: the prompt has no tokens, or too many for the model.
    """
    with _restored():
        from hlat.evaluation import Sampling, generate_text

        sampling = Sampling(temperature, top_k, top_p, seed)
        return generate_text(checkpoint, prompt, max_tokens, sampling, weights)


def average(
    checkpoints: str | Path | Sequence[str | Path],
    to: str | Path,
    *,
    last: int | None = None,
    coefficients: Sequence[float] | None = None,
    decay: float | None = None,
    weights: str = "model",
) -> Path:
    """Average the weights of several checkpoints of the same model, saved in any layouts.

    Sums are accumulated in float64 and rounded once, to the stored data type. Memory depends on neither the size of the
    model nor the number of checkpoints.

    Args:
        checkpoints: checkpoints (or run folders, which stand for their newest checkpoint), oldest first.
        to: checkpoint to be written; it must not exist.
        last: average this many newest checkpoints of the only entry of ``checkpoints``, a run folder.
        coefficients: a positive factor for each checkpoint; None for equal ones.
        decay: each checkpoint counts ``decay`` times as much as the next newer one.
        weights: "model", or "ema" for the moving averages, if the runs keep one.

    Returns:
        The folder of the average, which ``load_model``, ``evaluate``, ``generate``, ``hlat export`` and
        ``checkpoint.init_from`` take. Its metadata names the parents.

    Raises:
        CheckpointError: there is no valid checkpoint, the models differ, or the arguments are wrong.
        StorageError: the average cannot be written; nothing is left behind.
    """
    from hlat.checkpoint import average_checkpoints

    paths = [checkpoints] if isinstance(checkpoints, str | Path) else list(checkpoints)
    return average_checkpoints(paths, to, last=last, coefficients=coefficients, decay=decay, weights=weights)


def load_model(
    checkpoint: str | Path,
    *,
    dtype: "torch.dtype | None" = None,
    device: "torch.device | str" = "cpu",
    weights: str = "model",
) -> "Decoder":
    """Load a trained model as a plain ``torch.nn.Module``, in eval mode.

    ``model(tokens)`` maps token ids of shape (batch, sequence) to logits of shape (batch, sequence, vocabulary).

    Args:
        checkpoint: a checkpoint, a checkpoints folder or a run folder; or a Hugging Face folder, such as an export.
        dtype: data type of the weights and of the computation; None for the stored one.
        device: device of the weights.
        weights: "model", or "ema" for the average of the weights, if the run keeps one.

    Raises:
        CheckpointError: there is no valid checkpoint, it has no such weights, or files of the folder are damaged.
        RecipeError: hlat does not have the architecture of the Hugging Face folder.
    """
    from hlat.checkpoint import is_checkpoint, load_hf_model
    from hlat.checkpoint import load_model as load_checkpoint

    folder = Path(checkpoint)
    if (folder / "config.json").is_file() and not is_checkpoint(folder) and not (folder / "checkpoints").is_dir():
        if weights != "model":
            raise CheckpointError(f"{folder}: a Hugging Face folder has one set of weights, not weights={weights!r}.")
        return load_hf_model(folder, device, dtype).eval()
    model, _ = load_checkpoint(folder, device, dtype, weights)
    return model.eval()


def metrics(run: str | Path) -> "pa.Table":
    """Read the metrics of a run, which may be in progress, as a table.

    It is a ``pyarrow.Table``: ``.to_pandas()`` makes it a pandas.DataFrame, ``polars.from_arrow(table)`` one of polars.

    Args:
        run: run folder, or its metrics.jsonl.

    Returns:
        One row per logged step, ascending; no step twice: of repeated steps (after a resume) the last line counts, and
        an incomplete last line is ignored. Columns are the keys of metrics.jsonl; those of nested values have a dot, as
        ``seconds.forward``. Values that a step does not have are null.

    Raises:
        DataError: the run has no metrics, or a line is damaged.
        StorageError: the file cannot be read.
    """
    from hlat.tracking import metrics_table

    return metrics_table(Path(run))


# --- helpers -----------------------------------------------------------------------------------------------


def _words(overrides: Overrides) -> list[str]:
    """Overrides as the command line has them."""
    if not isinstance(overrides, Mapping):
        return [overrides] if isinstance(overrides, str) else list(overrides)
    return [f"{path}={_yaml(value)}" for path, value in overrides.items()]


def _yaml(value: object) -> str:
    """Write a value as YAML on one line; floats always have a point, without which YAML takes 1e-3 for a text."""
    if isinstance(value, float):
        text = repr(value)
        mantissa, mark, exponent = text.partition("e")
        return f"{mantissa}.0e{exponent}" if mark and "." not in mantissa else text
    return json.dumps(value, default=str)


@contextmanager
def _job(
    recipe: Recipe | str | Path,
    overrides: Overrides,
    profile: bool = False,
    allow_faults: bool = False,
    require_step: int | None = None,
) -> Iterator[TrainingJob]:
    """Make a job of a recipe; one that is not a file is written to a temporary file, which processes can load."""
    options = (profile, allow_faults, require_step)
    if not isinstance(recipe, Recipe):
        yield TrainingJob(str(recipe), tuple(_words(overrides)), *options)
        return
    if overrides:
        raise LaunchError("overrides change a recipe file while it is loaded: give them to hlat.load_recipe.")
    with TemporaryDirectory(prefix="hlat-") as folder:
        file = Path(folder) / f"{recipe.run.name}.yaml"
        file.write_text(json.dumps(recipe.model_dump(mode="json")), encoding="utf-8")
        yield TrainingJob(str(file), (), *options)


@contextmanager
def _restored() -> Iterator[None]:
    """Restore the settings of the process and its random generators at the end of the block."""
    python_state = random.getstate()  # first: modules that are imported now may draw a number
    from hlat.runtime.backend import restored_settings
    from hlat.runtime.randomness import rng_state, set_rng_state

    state = rng_state()
    try:
        with restored_settings():
            yield
    finally:
        set_rng_state(state)
        random.setstate(python_state)


def _train_here(job: TrainingJob) -> TrainingResult:
    from hlat.runtime import rank_info
    from hlat.tracking import LogStream

    with _restored(), LogStream(_LOG) as stream:
        recipe = job.load(rank_info().world)
        outcome = job.train_here(recipe, stream=stream)
        return _result(recipe, outcome.step, outcome.reason, outcome.checkpoint)


def _train_supervised(job: TrainingJob, least: int, most: int) -> TrainingResult:
    with _restored():
        return _supervise(job, least, most)


def _supervise(job: TrainingJob, least: int, most: int) -> TrainingResult:
    failures: list[RunOutcome] = []
    options = SupervisionOptions(
        least, most, complain=_LOG.warning, say=_LOG.info, failed=failures.append, show=_LOG.info
    )
    recipe = job.load(most)
    supervise_job(job, options)
    if failures:
        raise _error(failures[-1])
    from hlat.checkpoint.protocol import step_folder_name
    from hlat.tracking import read_events

    ends = [event for event in read_events(recipe.run_dir / "events.jsonl") if event["event"] == "end"]
    if not ends:
        raise LaunchError("the run was stopped before its first step. The same call begins again.")
    step = int(ends[-1]["step"])
    folder = recipe.run_dir / "checkpoints" / step_folder_name(step)
    return _result(recipe, step, str(ends[-1]["reason"]), folder if folder.is_dir() else None)


def _result(recipe: Recipe, step: int, reason: str, checkpoint: Path | None) -> TrainingResult:
    """Make the result of a run from its last line of metrics."""
    rows: list[dict[str, Any]] = []
    if (recipe.run_dir / "metrics.jsonl").is_file():
        rows = metrics(recipe.run_dir).to_pylist()
    last = rows[-1] if rows else {}
    validated = last if last.get("step") == step else {}
    return TrainingResult(
        step,
        recipe.total_steps,
        reason,
        last.get("loss"),
        validated.get("val_loss"),
        validated.get("val_bits_per_byte"),
        checkpoint,
        recipe.run_dir,
    )


def _error(outcome: RunOutcome) -> HlatError:
    """Make the error of a run in other processes: of the class that ended its first failing process."""
    report = outcome.cause.report if outcome.cause is not None else None
    kind = error_class(report.error if report is not None else "", outcome.exit_code)
    return kind(outcome.message)
