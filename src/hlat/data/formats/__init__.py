"""File formats: read the bytes of a file as rows, and rows as documents.

base       the protocol of a format, and ranges: parts of a file that can be opened alone
registry   the list of all formats
rows       rows, and what a column of them holds: text, or token ids
streams    decompression and lines
and a file for each format
"""
