"""The folder of the benchmarks, from which its scripts import their neighbours."""

import sys
from pathlib import Path

# Last: its modules have names of their own, and some the names of others (Python 3.14 has a package `compression`).
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
