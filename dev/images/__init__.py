"""Container images without a Docker engine: built by buildah from Dockerfiles, loaded into the cluster or pushed."""
