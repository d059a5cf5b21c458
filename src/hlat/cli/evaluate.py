"""``hlat evaluate`` and ``hlat generate``: validation loss of a checkpoint, and text from it."""

from typing import Annotated

import typer

from hlat.cli.common import CheckpointArgument, WeightsOption, ready, say


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command()(evaluate)
    app.command()(generate)


def evaluate(
    checkpoint: CheckpointArgument,
    data: Annotated[str | None, typer.Option(help="Folder of prepared data; default: that of the run.")] = None,
    weights: WeightsOption = "model",
) -> None:
    """Compute loss, perplexity and bits per byte over the whole validation split."""
    import hlat.evaluation  # while Ctrl-C cannot interrupt it

    ready()
    result = hlat.evaluate(checkpoint, data, weights=weights)
    say(f"validation loss {result.loss:.4f}, perplexity {result.perplexity:.2f}")
    say(f"{result.bits_per_byte:.4f} bits per byte, over {result.tokens:,} tokens")


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
