"""The model: configs, checkpoints, tokenizers, and one decoder for all families."""
