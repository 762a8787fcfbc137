"""Binaries of a Kubernetes cluster, built from pinned Go modules. Each module has its folder, and its go.sum locks
every byte.
"""
