"""Where KV cache lies in memory: the regions that a process registers, the arena that holds them, and block plans.

Pure data and numpy: no sockets, no threads, no engine. Nothing here knows of rooms, attempts or peers.
"""
