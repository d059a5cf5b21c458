"""Recipe files and Hugging Face config.json files, read into plain values."""
