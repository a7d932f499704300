"""Bytes → image → content hash → model inputs, with limits; placeholder ranges and their extra keys.

Imports nothing of Foreword's: an embedder without HTTP needs it as much as the frontend does.
"""
