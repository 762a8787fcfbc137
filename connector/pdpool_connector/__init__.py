"""pdpool's connector: moves the KV cache of a request from a prefill engine to a decode engine."""
