"""Container images without a Docker engine: buildah builds them from Dockerfiles. They are loaded into the cluster or
pushed.
"""
