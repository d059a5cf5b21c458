"""Preparation of a corpus: worker processes tokenize it into token shards, on one machine or on several."""
