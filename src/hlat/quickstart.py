"""Quickstart: the complete workflow on one machine, from text to a model in a Hugging Face folder.

source text of Python's standard library, which every machine has
-> tokenizer, shards -> training -> evaluation -> a sample -> Hugging Face folder -> report
"""

import shutil
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from hlat.checkpoint import export_hf
from hlat.config import Recipe, load_recipe
from hlat.evaluation import Perplexity, Sampling, evaluate_checkpoint, generate_text
from hlat.reporting import write_report
from hlat.runtime.errors import LaunchError
from hlat.tracking import append_samples, show_progress, show_stages
from hlat.training import DataProgress, Outcome, run

# No standard-library source written by hand: installed packages, test data with deliberate encoding errors, and
# generated tables.
_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "lib2to3", "pydoc_data", "encodings", "__pycache__"}


def standard_library() -> list[dict[str, str]]:
    """Entries of ``data.sources`` for this Python's standard library. LaunchError: it has no source text."""
    root = Path(sysconfig.get_paths()["stdlib"])
    packages = sorted(d for d in root.iterdir() if d.is_dir() and d.name not in _EXCLUDED) if root.is_dir() else []
    patterns = [root / "*.py", *(package / "**" / "*.py" for package in packages if any(package.rglob("*.py")))]
    if not any(root.glob("*.py")):
        message = f"{root}: contains no Python source text, which is the corpus of the quickstart."
        raise LaunchError(f"{message} Use a text of your own: hlat train quickstart data.path=FOLDER")
    return [{"path": str(pattern)} for pattern in patterns]


PROMPT = "def read(self, size=-1):\n"


@dataclass(frozen=True)
class QuickstartResult:
    """Outcome, numbers and files of the quickstart."""

    outcome: Outcome
    evaluation: Perplexity
    sample: str
    run_dir: Path
    export_dir: Path
    report: Path


def quickstart_recipe(folder: Path, steps: int | None) -> Recipe:
    """The shipped recipe ``quickstart``, on this machine's standard library."""
    overrides = [f"run.dir={folder}", f"data.sources={standard_library()}"]
    if steps is not None:
        # A warm-up longer than the run would never reach the learning rate.
        overrides += [f"training.steps={steps}", f"schedule.warmup_steps={min(30, steps // 2)}"]
    return load_recipe("quickstart", overrides)


def run_quickstart(
    folder: Path, say: Callable[[str], None], data_progress: DataProgress = nullcontext, steps: int | None = None
) -> QuickstartResult:
    """Train, evaluate, sample and export in ``folder``; an interrupted quickstart resumes.

    Args:
        folder: run directory; the export goes to its subfolder ``hf``.
        say: shows a message to the user.
        data_progress: context manager that opens a progress display while text is prepared.
        steps: training steps, instead of the recipe's.

    Raises:
        LaunchError: training was interrupted, Python has no source text, or the folder is in use for something else.
    """
    begin = time.monotonic()
    export_dir = folder / "hf"
    if export_dir.exists() and not (folder / "checkpoints").is_dir():
        message = f"{export_dir}: exists, and is not from an earlier quickstart."
        raise LaunchError(f"{message} Name another folder with --to, or move it away.")
    recipe = quickstart_recipe(folder, steps)
    say(f"corpus: the source text of this machine's Python standard library, {len(recipe.data.sources)} packages")
    with show_stages(recipe.tracking, say):
        outcome = run(recipe, data_progress=data_progress)
    if not outcome.finished or outcome.checkpoint is None:
        raise LaunchError(f"stopped at step {outcome.step} ({outcome.reason}). The same command resumes from there.")
    say("evaluating on held-out files ...")
    with show_progress(sys.stdout, say) as progress:
        evaluation = evaluate_checkpoint(outcome.checkpoint, progress=progress)
    say(
        f"held-out files: loss {evaluation.loss:.3f}, perplexity {evaluation.perplexity:.1f}, "
        f"{evaluation.bits_per_byte:.3f} bits per byte over {evaluation.tokens:,} tokens"
    )
    generated = generate_text(outcome.checkpoint, PROMPT, 96, Sampling(temperature=0.8, top_p=0.95))
    (folder / "sample.txt").write_text(PROMPT + generated, encoding="utf-8")
    append_samples(folder, outcome.step, [(PROMPT, generated)])
    _export(outcome.checkpoint, export_dir)
    report = write_report([folder])
    result = QuickstartResult(outcome, evaluation, PROMPT + generated, folder, export_dir, report)
    say(_closing_message(result, time.monotonic() - begin))
    return result


def _export(checkpoint: Path, target: Path) -> None:
    # Exported beside it: an interruption leaves the export of an earlier quickstart whole.
    new = target.with_name(f"{target.name}.new")
    # Left by an export that was interrupted.
    shutil.rmtree(new, ignore_errors=True)
    export_hf(checkpoint, new)
    shutil.rmtree(target, ignore_errors=True)
    new.rename(target)


def _closing_message(result: QuickstartResult, seconds: float) -> str:
    indented = "\n".join(f"    {line}" for line in result.sample.rstrip().splitlines())
    return f"""
a sample, from the prompt {PROMPT!r}:
{indented}

done in {seconds:.0f} s. Files:
  {result.run_dir}/metrics.jsonl   every logged step
  {result.run_dir}/tensorboard     tensorboard --logdir {result.run_dir}  (pip install tensorboard)
  {result.outcome.checkpoint}   the last checkpoint
  {result.report}   what happened, as a page for the browser
  {result.export_dir}   the model for transformers: AutoModelForCausalLM.from_pretrained("{result.export_dir}")
Next steps:
  hlat generate {result.run_dir} --prompt "import " --temperature 0.8
  hlat train quickstart data.path=YOUR_TEXTS run.name=mine     the same on your own text
  hlat check --no-files hlat-7b                                HLAT's 7B recipe, to start a large run from"""
