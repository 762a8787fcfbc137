"""The demo: pdpool on a real Kubernetes, from nothing to an answer, a stuck queue, its alert, and its end."""
