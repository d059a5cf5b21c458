"""hlat: pre-train LLaMA-class language models on the hardware you have, from one recipe file."""

from importlib.metadata import version

__version__ = version("hlat")
