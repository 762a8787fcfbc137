"""The live connector: one owner thread around a pure machine, one worker per peer, and the API that engines call."""
