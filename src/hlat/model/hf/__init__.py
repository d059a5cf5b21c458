"""Models in the format of Hugging Face: config.json, and folders of weights."""
