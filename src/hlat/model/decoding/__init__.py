"""Decoding of single tokens by one call of C for all blocks; torch's operations are the reference and the fallback."""
