"""A model written for others: safetensors, quantised or not, and GGUF."""
