"""Diagnosis: from the history of queue samples to a verdict with its evidence, and whose fault it is. Pure."""
