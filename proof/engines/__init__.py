"""Real SGLang 0.5.23 servers on CPU, with pdpool's plugin and with SGLang's own NIXL backend: `make engines`."""
