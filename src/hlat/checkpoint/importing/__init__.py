"""The formats that ``hlat import`` reads: Hugging Face folders, NeuronX Distributed shards, torchtitan checkpoints."""
