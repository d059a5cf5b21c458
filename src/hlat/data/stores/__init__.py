"""Local files and object stores: atomic writes, retries, downloads, and a size-limited cache of remote files."""
