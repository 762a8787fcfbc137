"""Real vLLM on CPU with pdpool's connector: tokens, aborts and faults."""
