"""Debian's Prometheus in the local cluster: its manifests, their deployment, and promtool for the rule tests."""
