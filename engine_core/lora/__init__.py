"""LoRA adapters in the engine, whatever computes with them."""
