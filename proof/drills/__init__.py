"""Drills on the local cluster: faults and changes under steady traffic, and what pdpool says and loses meanwhile."""
