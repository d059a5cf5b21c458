"""``python -m hlat`` is the command ``hlat``."""

from hlat.command import main

if __name__ == "__main__":  # processes that a command starts import this module too
    main()
