"""Compiled code: libraries in C, which are compiled and kept, and the check of folders from which code is loaded."""
