"""``python -m hlat`` is the command ``hlat``."""

from hlat.command import main

main()
