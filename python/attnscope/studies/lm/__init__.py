"""Training steps of transformer language models."""
