"""What travels between processes: message types, wire codec, sockets.

Imports nothing of Foreword's. `ipc.vocabulary` is also that of the embedding API: the engine core
re-exports the types a caller needs.
"""
