"""Engines and router as processes of one machine: what `pdpool demo`, `make oracle` and the tests start."""
