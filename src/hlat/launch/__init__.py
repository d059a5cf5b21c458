"""Starting the processes of a run on this machine, and saying in one voice how they ended."""

from hlat.launch.follow import follow_launcher
from hlat.launch.local import launch_local
from hlat.launch.report import reported

__all__ = ["follow_launcher", "launch_local", "reported"]
