"""Display of a run for people: the stages of its start, and its console, on terminals and in log files."""
