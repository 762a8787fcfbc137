"""Observation: reads the state of cluster and engines, and keeps unknown values unknown. I/O, but no decisions."""
