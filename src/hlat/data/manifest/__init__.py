"""Manifest of prepared data: its types, files and checksums, the settings used to prepare it, and bad rows."""
