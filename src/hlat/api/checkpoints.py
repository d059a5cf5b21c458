"""Use of trained models: evaluation, generation, loading as a plain module; import, export, averages and forks.

checkpoint --evaluate, evaluate_tasks, watch--> results      --generate--> text      --load_model--> torch.nn.Module
checkpoints --average--> checkpoint     checkpoint of a run --fork--> run     checkpoint --export--> Hugging Face folder
model of another program --import_model--> checkpoint
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hlat.api.recipes import Overrides, checks_arguments, optional_text, override_words
from hlat.api.training import outcome_error, restored
from hlat.launch import EvaluationJob, refuse_worker, run_processes

if TYPE_CHECKING:
    import torch

    from hlat.checkpoint import Fork
    from hlat.evaluation import EvaluatedCheckpoint, Perplexity, SuiteReport
    from hlat.model import Decoder


_LOG = logging.getLogger("hlat")


@checks_arguments
def evaluate(
    checkpoint: str | Path,
    data: str | Path | None = None,
    *,
    weights: str = "model",
    on_progress: "Callable[[str, int, int], None] | None" = None,
) -> "Perplexity":
    """Evaluate a checkpoint on its complete validation split.

    Args:
        checkpoint: a checkpoint, a checkpoints folder or a run folder.
        data: folder of prepared data; None for that of the run.
        weights: "model", or "ema" for the average of the weights, if the run keeps one.
        on_progress: called with what is evaluated, the micro-batches done and their number.

    Returns:
        ``loss`` (nats per token), ``perplexity``, ``bits_per_byte`` and ``tokens``; ``sources`` and ``sets``, by name,
        the same for each source of the split, if it has several, and for each of ``evaluation.sets``; ``to_dict()``
        has JSON values.

    Raises:
        CheckpointError: there is no valid checkpoint.
        DataError: there is no prepared data, or it does not fit the checkpoint, or is damaged.
    """
    with restored():
        from hlat.evaluation import evaluate_checkpoint

        return evaluate_checkpoint(checkpoint, data, weights, on_progress)


@checks_arguments
def evaluate_tasks(
    checkpoint: str | Path,
    tasks: Sequence[str] = (),
    *,
    suite: str | Path | None = None,
    out: str | Path | None = None,
    files: str | Path | None = None,
    include: str | Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
    seed: int = 1234,
    max_length: int | None = None,
    max_new_tokens: int | None = None,
    allow_code_execution: bool | Literal["unsafe"] = False,
    weights: str = "model",
    dtype: str = "auto",
    nproc: int = 1,
    tensor: int = 1,
    batch_tokens: int = 2048,
    batch_rows: int = 64,
) -> "SuiteReport":
    """Run tasks of lm-eval, or a suite of them. An interrupted evaluation goes on with the same call.

    Args:
        checkpoint: a checkpoint, a checkpoints folder or a run folder; or a Hugging Face folder.
        tasks: names of tasks; empty for a suite.
        suite: "hlat", "offline", "domain", or a YAML file; None for ``tasks``.
        out: folder of the results; None for ``evaluation/NAME``, after the name of the checkpoint.
        files: folder of the suite's data files.
        include: folder with further tasks, as YAML files.
        shots: solved examples in front of each question, for ``tasks``; None for the tasks' own number.
        limit: most samples of each task; None for all.
        seed: seed of the choice of examples, and of sampled texts.
        max_length: most tokens of question and answer; None for the model's maximum.
        max_new_tokens: most tokens of a generated text; None for what the task says.
        allow_code_execution: True executes code that the model writes in a sandbox, "unsafe" without one.
        weights: "model", or "ema" for the average of the weights, if the run keeps one.
        dtype: "auto" (that of the weights), "float32", "bfloat16" or "float16".
        nproc: 1 evaluates in this process; a larger number starts that many processes on this machine.
        tensor: processes that share one copy of the model.
        batch_tokens: most tokens of a forward pass.
        batch_rows: most texts that are generated together.

    Returns:
        ``columns`` (percent by column), ``average``, ``tasks`` (version, shots, samples and metrics of each),
        ``model``, ``harness``, ``settings``, ``run``; and ``to_dict()`` with everything as JSON values.

    Raises:
        DataError: lm-eval is not installed; or tasks, data files or downloads are missing: lists all.
        CheckpointError: there is no valid checkpoint, or it has no tokenizer.
        LaunchError: options contradict each other, or the model cannot be divided over the processes.
        StorageError: results cannot be written.
    """
    given = locals()
    del given["nproc"]
    # As on the command line, since other processes get the job as its arguments.
    given |= {"checkpoint": str(checkpoint), "tasks": ",".join(tasks) or None}
    given |= {"to": given.pop("out"), "max_tokens": given.pop("max_new_tokens")}
    job = EvaluationJob(**given | {name: optional_text(given[name]) for name in ("suite", "to", "files", "include")})
    with restored():
        from hlat.evaluation import read_report

        loaded = job.load_suite()
        if nproc == 1:
            job.evaluate_here(loaded, lambda what, done, total: _LOG.info("%s: %d of %d", what, done, total))
        else:
            refuse_worker(nproc)
            outcome = run_processes(job.arguments(), nproc, job.folder, _LOG.info)
            if outcome.exit_code:
                # The class of error that the failing process had, as if it had been raised here.
                raise outcome_error(outcome)
        # From disk: rank 0 may have been another process.
        return read_report(job.folder)


@checks_arguments
def watch(
    run: str | Path,
    tasks: Sequence[str | Path] = (),
    *,
    weights: str = "model",
    once: bool = False,
    on_result: "Callable[[EvaluatedCheckpoint], None] | None" = None,
) -> "list[EvaluatedCheckpoint]":
    """Evaluate each checkpoint of a run, while it goes on, on what its recipe names; write evaluations.jsonl.

    Args:
        run: folder of the run.
        tasks: further files of requests, as in ``evaluation.tasks``.
        weights: "model", or "ema" for the average of the weights, if the run keeps one.
        once: evaluate the checkpoints that exist, and return; otherwise return when the run has finished.
        on_result: called with the results of each checkpoint as soon as they are written.

    Returns:
        Results of the checkpoints that had none before: ``step``, ``tokens``, and ``result`` with ``validation``,
        ``sets``, ``tasks`` and ``columns()``, the values under the names of metrics.jsonl.

    Raises:
        CheckpointError: the folder is no run, or has no checkpoint yet and ``once`` is set.
        DataError: data, a set or a file of requests cannot be used.
        StorageError: results cannot be written.
    """
    with restored():
        from hlat.evaluation import watch_run

        results = []
        for result in watch_run(run, tasks, weights=weights, once=once, skipped=_LOG.warning):
            results.append(result)
            if on_result is not None:
                on_result(result)
        return results


@checks_arguments
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
    """Continue a text; return the continuation, without the prompt.

    If ``max_tokens`` allows 24 or more new tokens, a CPU multiplies by packed weights, which rounds differently. So
    where two tokens are almost equally likely, a greedy text may depend on ``max_tokens``.

    Args:
        checkpoint: a checkpoint, a checkpoints folder or a run folder.
        prompt: text to continue.
        max_tokens: most tokens to generate; fewer if the context is full or the text ends.
        temperature: sampling temperature; 0 is greedy.
        top_k: sample from the k most likely tokens.
        top_p: sample from the smallest set of tokens with total probability p.
        seed: seed of the sampling.
        weights: "model", or "ema" for the average of the weights, if the run keeps one.

    Raises:
        CheckpointError: there is no valid checkpoint, or it has no tokenizer.
        DataError: the prompt has no tokens, or too many for the model; or a number has no meaning, as a top_p without a
            temperature.
    """
    with restored():
        from hlat.evaluation import Sampling, generate_text

        sampling = Sampling(temperature, top_k, top_p, seed)
        return generate_text(checkpoint, prompt, max_tokens, sampling, weights)


@checks_arguments
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
    from hlat.checkpoint import open_model

    return open_model(checkpoint, weights).load(device, dtype).eval()


@checks_arguments
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


@checks_arguments
def fork(run: str | Path, to: str | Path, overrides: Overrides = ()) -> "Fork":
    """Make a new run from a checkpoint of another one, which may be training, and share its state and prepared data.

    Args:
        run: run folder, for its newest checkpoint, or RUN@STEP.
        to: folder of the new run; its last name is the name of the run.
        overrides: changes of the recipe from that step on, as ``["optimizer.lr=1e-4"]`` or ``{"optimizer.lr": 1e-4}``.

    Returns:
        ``folder``, ``parent``, ``step``, ``recipe`` (for ``hlat.train``), ``changes``, and ``way`` (hard link,
        reference copy or copy); ``rates`` are those of the next step by the parent's recipe and by the fork's.

    Raises:
        CheckpointError: there is no such checkpoint, ``to`` exists, or a fork cannot change a field.
        RecipeError: the recipe with these overrides has mistakes.
        StorageError: a file-system operation failed; there is no new run then.
    """
    from hlat.checkpoint import fork_run
    from hlat.training import check_fork_stages

    return fork_run(str(run), Path(to), override_words(overrides), check=check_fork_stages)


@checks_arguments
def import_model(
    source: str | Path, to: str | Path, *, model: str | Path | None = None, tokenizer: str | Path | None = None
) -> Path:
    """Convert a model of another program to a checkpoint of its weights, in their data types; return its folder.

    Args:
        source: folder of the model: Hugging Face's, shards of HLAT or NxDT, or DCP files of torchtitan.
        to: checkpoint to be written; it must not exist, or be an empty folder.
        model: preset or config.json of the model, for formats that do not describe it.
        tokenizer: tokenizer.json, a SentencePiece model, or a folder with one of them; None for the source's own.

    Raises:
        RecipeError: hlat does not support this model, or there is no such preset.
        CheckpointError: the format is not known, files are missing or damaged, or ``to`` exists and is not empty.
        StorageError: a file-system operation failed; nothing is left behind.
    """
    from hlat.checkpoint import import_model as convert

    return convert(source, to, model=model, tokenizer=tokenizer)


@checks_arguments
def export(
    checkpoint: str | Path, to: str | Path, *, dtype: "torch.dtype | str | None" = None, weights: str = "model"
) -> Path:
    """Write a checkpoint as a Hugging Face model, with its tokenizer, that transformers loads; return the folder.

    Args:
        checkpoint: a checkpoint, a checkpoints folder or a run folder.
        to: folder to be written; it must not exist, or be empty.
        dtype: data type of the files, as torch.bfloat16 or "bfloat16"; None for the stored one.
        weights: "model", or "ema" for the average of the weights, if the run keeps one.

    Raises:
        CheckpointError: there is no valid checkpoint, or no such weights, or ``to`` exists and is not empty.
        StorageError: a file-system operation failed; nothing is left behind.
    """
    from hlat.checkpoint import export_hf

    return export_hf(checkpoint, to, dtype=dtype, weights=weights)
