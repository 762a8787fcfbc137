"""The demo: pdpool on a real Kubernetes, from the installation to an answer, a stuck queue, its alert and recovery."""
