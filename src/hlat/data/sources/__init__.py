"""Sources of a corpus: paths, globs and URLs resolve to a sorted list of files with fingerprints."""
