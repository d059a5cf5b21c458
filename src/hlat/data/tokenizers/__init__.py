"""Tokenizers: text to token ids and back, from tokenizer.json files, SentencePiece models, or trained on a corpus."""
