"""Hugging Face model folders: read and write config.json and safetensors files; canonical tensor names and shapes."""
