"""Everything that faces people: HTTP APIs, prompts, text, the command line, and the engine's client.

Runs in a process of its own, loads no torch and computes nothing.
"""
