"""The steps of ``hlat quickstart``.

standard library -> tokenizer, shards -> training -> evaluation -> a sample -> Hugging Face folder
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hlat.checkpoint import export_hf
from hlat.config import Recipe, load_recipe
from hlat.evaluation import Perplexity, Sampling, evaluate_checkpoint, generate_text
from hlat.quickstart.corpus import standard_library
from hlat.runtime import LaunchError
from hlat.training import DataProgress, Outcome, no_progress, run

PROMPT = "def read(self, size=-1):\n"


@dataclass(frozen=True)
class Result:
    """What the quickstart leaves behind."""

    outcome: Outcome
    evaluation: Perplexity
    sample: str
    run_dir: Path
    export_dir: Path


def quickstart_recipe(folder: Path, steps: int | None) -> Recipe:
    """The shipped recipe, on this machine's standard library."""
    overrides = [f"run.dir={folder}", f"data.sources={standard_library()}"]
    if steps is not None:
        overrides += [f"training.steps={steps}", f"schedule.warmup_steps={min(30, steps // 2)}"]
    return load_recipe("quickstart", overrides)


def run_quickstart(
    folder: Path,
    say: Callable[[str], None],
    data_progress: DataProgress = no_progress,
    steps: int | None = None,
) -> Result:
    """Train, evaluate, sample and export in ``folder``; an interrupted quickstart goes on where it stopped.

    Args:
        folder: run directory; the export goes to its subfolder ``hf``.
        say: told what happens, line by line.
        data_progress: opens a display for the time that text is prepared.
        steps: train so many steps instead of the recipe's.

    Raises:
        LaunchError: an interrupted run, a Python without source text, or a folder in use for something else.
    """
    begin = time.monotonic()
    export_dir = folder / "hf"
    if export_dir.exists() and not (folder / "checkpoints").is_dir():
        message = f"{export_dir}: exists, and not from an earlier quickstart."
        raise LaunchError(f"{message} Name another folder with --to, or move it away.")
    recipe = quickstart_recipe(folder, steps)
    say(f"corpus: the source text of this machine's Python standard library, {len(recipe.data.sources)} packages")
    outcome = run(recipe, data_progress=data_progress)
    if not outcome.finished or outcome.checkpoint is None:
        raise LaunchError(f"stopped at step {outcome.step} ({outcome.reason}). The same command goes on from there.")
    say("evaluating on files that were kept aside ...")
    evaluation = evaluate_checkpoint(outcome.checkpoint)
    say(
        f"held-out files: loss {evaluation.loss:.3f}, perplexity {evaluation.perplexity:.1f}, "
        f"{evaluation.bits_per_byte:.3f} bits per byte over {evaluation.tokens:,} tokens"
    )
    sample = PROMPT + generate_text(outcome.checkpoint, PROMPT, 96, Sampling(temperature=0.8, top_p=0.95))
    (folder / "sample.txt").write_text(sample, encoding="utf-8")
    _export(outcome.checkpoint, export_dir)
    say(_closing_words(Result(outcome, evaluation, sample, folder, export_dir), time.monotonic() - begin))
    return Result(outcome, evaluation, sample, folder, export_dir)


def _export(checkpoint: Path, target: Path) -> None:
    """Export beside an export of an earlier quickstart, which goes only once the new one is whole."""
    new = target.with_name(f"{target.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    export_hf(checkpoint, new)
    shutil.rmtree(target, ignore_errors=True)
    new.rename(target)


def _closing_words(result: Result, seconds: float) -> str:
    indented = "\n".join(f"    {line}" for line in result.sample.rstrip().splitlines())
    return f"""
a sample, begun with {PROMPT!r}:
{indented}

done in {seconds:.0f} s. What is where:
  {result.run_dir}/metrics.jsonl   every logged step
  {result.run_dir}/tensorboard     tensorboard --logdir {result.run_dir}
  {result.outcome.checkpoint}   the last checkpoint
  {result.export_dir}   the model for transformers: AutoModelForCausalLM.from_pretrained("{result.export_dir}")
What next:
  hlat generate {result.run_dir} --prompt "import " --temperature 0.8
  hlat train quickstart data.path=YOUR_TEXTS run.name=mine     the same on your own text
  hlat check hlat-7b                                           HLAT's 7B recipe, to start a large run from"""
