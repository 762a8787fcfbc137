"""Tools for developing pdpool on one machine: pinned binaries, a local Kubernetes, images, the demo."""
