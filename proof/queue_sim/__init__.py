"""Runs the operator's diagnosis over simulated months of traffic, with and without faults, and scores its verdicts."""
