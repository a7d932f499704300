"""A chat in a terminal, with any OpenAI-compatible server."""
