"""LoRA adapters over a transformers model: how they are read, and how they are computed."""
