"""``python -m hlat.cli`` is the command ``hlat``."""

from hlat.cli import main

main()
