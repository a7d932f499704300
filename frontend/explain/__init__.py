"""What a request would find in the prefix cache, and why no more: answered without running it."""
