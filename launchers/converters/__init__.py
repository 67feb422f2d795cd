"""The converter of recipes written for Hugging Face's Trainer, for accelerate or with FSDP1's names."""
