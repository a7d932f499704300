"""What travels between processes: message types, wire codec, sockets.

Imports nothing of Foreword's. `ipc.messages` is also the vocabulary of the embedding API: the engine
core re-exports the types a caller needs.
"""
