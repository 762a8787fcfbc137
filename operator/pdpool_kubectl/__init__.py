"""`kubectl pdpool`: what a person asks of pools and services. It reads the cluster with the rights of that person."""
