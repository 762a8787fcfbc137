"""Binaries of a Kubernetes cluster, built from pinned Go modules: one folder each, every byte locked by its go.sum."""
