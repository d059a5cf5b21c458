"""The launcher in its own process, for tests that send it signals: ``launcher.py NPROC SCENARIO FOLDER``."""

import sys
from pathlib import Path

from tests.support.launch.launching import run_workers

WORKER = Path(__file__).with_name("worker.py")


def main():
    nproc, scenario, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    command = [sys.executable, str(WORKER), scenario, str(folder)]
    return run_workers(command, nproc, folder / "run", lambda message: print(message, file=sys.stderr))


if __name__ == "__main__":
    sys.exit(main())
