"""Tests of ``hlat.model.decoding``."""
