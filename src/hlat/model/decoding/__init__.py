"""Decoding of single tokens by one call of C for all blocks; torch's operations are the reference and the fallback."""

from hlat.model.decoding.step import CompiledStep, compile_step

__all__ = ["CompiledStep", "compile_step"]
