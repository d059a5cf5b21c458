"""Streams of bytes: decompressed while they are read, and split into lines and records with bounded memory."""
