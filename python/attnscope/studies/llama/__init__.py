"""A Llama model of Hugging Face transformers, by attention implementation."""
