"""Prepared data on disk: open token shards, and check them against their manifest."""
