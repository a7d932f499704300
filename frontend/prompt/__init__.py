"""Chat template → text → token ids → `EngineRequest`: everything between an API's request and the engine's.

Knows no HTTP and no API: what is wrong with a prompt is said by the exceptions of `prompt.errors`.
"""
