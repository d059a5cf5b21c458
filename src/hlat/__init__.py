"""hlat: pre-train LLaMA-class language models on the hardware you have, from one recipe file.

Nothing is imported here: it would come before the command listens to Ctrl-C (``hlat.command``).
"""


def __getattr__(name: str) -> str:
    """The version, looked up when it is asked for."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version  # noqa: PLC0415

    return version("hlat")
