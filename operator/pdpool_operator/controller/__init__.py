"""The reconciles of pools and services: they read the cluster, ask the pure decisions, and carry them out."""
