"""hlat: pre-train LLaMA-class language models on the hardware you have, from one recipe file.

This module imports nothing: an import here would run before the command handles Ctrl-C (``hlat.command``).
"""


def __getattr__(name: str) -> str:
    """Look up ``__version__`` when it is first used."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version  # noqa: PLC0415

    return version("hlat")
