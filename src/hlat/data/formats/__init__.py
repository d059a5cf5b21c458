"""File formats: read the bytes of a file as rows, and rows as documents.

base       the protocol of a format
registry   the list of all formats
columns    what a column holds: text, or token ids
streams    decompression, lines and records
"""
