"""Bytes of memory that a rank needs in a candidate layout."""
