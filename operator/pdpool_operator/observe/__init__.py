"""Observation: what the cluster and the engines say, read with every absence kept as an absence. I/O, but no
decisions.
"""
