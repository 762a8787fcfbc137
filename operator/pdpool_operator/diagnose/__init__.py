"""Diagnosis: from the history of queue samples to a verdict, its evidence and the side at fault. Pure."""
