"""A real Kubernetes for development and tests: a control plane and two nodes as plain processes on this machine."""
