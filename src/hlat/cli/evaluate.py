"""``hlat evaluate`` and ``hlat generate``: validation loss of a checkpoint, and text from it."""

from typing import TYPE_CHECKING, Annotated

import typer

from hlat.cli.common import CheckpointArgument, WeightsOption, ready, say
from hlat.runtime import DataError

if TYPE_CHECKING:
    from hlat.evaluation import EvaluatedCheckpoint


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command()(evaluate)
    app.command()(generate)


def evaluate(
    checkpoint: CheckpointArgument,
    data: Annotated[str | None, typer.Option(help="Folder of prepared data; default: that of the run.")] = None,
    weights: WeightsOption = "model",
    watch: Annotated[
        bool, typer.Option("--watch", help="Evaluate each checkpoint of a run on what its recipe names, as it goes on.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="With --watch: end after the checkpoints that exist.")] = False,
    requests: Annotated[
        list[str] | None, typer.Option(help="With --watch: a further file of requests, as in evaluation.tasks.")
    ] = None,
) -> None:
    """Compute loss, perplexity and bits per byte over the whole validation split."""
    import hlat.evaluation  # while Ctrl-C cannot interrupt it

    ready()
    if watch:
        if data is not None:
            raise DataError("--watch evaluates on the data of the run; it takes no --data.")
        hlat.watch(checkpoint, requests or (), weights=weights, once=once, on_result=_say_result)
        return
    if once or requests:
        raise DataError("--once and --requests belong to --watch.")
    result = hlat.evaluate(checkpoint, data, weights=weights)
    say(f"validation loss {result.loss:.4f}, perplexity {result.perplexity:.2f}")
    say(f"{result.bits_per_byte:.4f} bits per byte, over {result.tokens:,} tokens")


def _say_result(found: "EvaluatedCheckpoint") -> None:
    values = "  ".join(f"{name} {value:.4f}" for name, value in found.result.columns().items())
    say(f"step {found.step}  {values}")


def generate(
    checkpoint: CheckpointArgument,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens to generate; fewer if the context is full.")
    ] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the k most likely tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Sample from the smallest set of tokens with total probability p."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    weights: WeightsOption = "model",
) -> None:
    r"""Continue a prompt. Control characters of the text are printed as escapes (\u001b), except newlines and tabs."""
    import hlat.evaluation

    ready()
    new = hlat.generate(
        checkpoint,
        prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        weights=weights,
    )
    say(prompt + new)
