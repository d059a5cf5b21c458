"""Prepared data on disk: token shards and their manifest.

manifest, settings, bad_rows   the record: files, counts, what decided the tokens, rows that cannot be read
shards                         tokens by position, compared as they are read
consistency, prepared_folder   open a folder, and check it against its manifest
summary                        for people
"""
