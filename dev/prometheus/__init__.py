"""Debian's Prometheus in the local cluster: its manifests, how they are applied, and promtool for the rule tests."""
