"""``hlat evaluate`` and ``hlat generate``: what a checkpoint is worth, and what it says."""

from typing import Annotated

import typer

from hlat.cli.common import CheckpointArgument, ready, say


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command()(evaluate)
    app.command()(generate)


def evaluate(
    checkpoint: CheckpointArgument,
    data: Annotated[
        str | None, typer.Option(help="Prepared data folder; default the one of the run, wherever the run lies.")
    ] = None,
) -> None:
    """Loss, perplexity and bits per byte over the whole validation split."""
    from hlat.evaluation import evaluate_checkpoint

    ready()
    result = evaluate_checkpoint(checkpoint, data)
    say(f"validation loss {result.loss:.4f}, perplexity {result.perplexity:.2f}")
    say(f"{result.bits_per_byte:.4f} bits per byte, over {result.tokens:,} tokens")


def generate(
    checkpoint: CheckpointArgument,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="At most so many, fewer where the context ends.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the k likeliest tokens only.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest share p.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
) -> None:
    """Continue a prompt. Control characters of the text are shown, as \\u001b, but for newlines and tabs."""
    from hlat.evaluation import Sampling, generate_text

    ready()
    say(prompt + generate_text(checkpoint, prompt, max_tokens, Sampling(temperature, top_k, top_p, seed)))
