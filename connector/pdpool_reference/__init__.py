"""A small real inference engine on the CPU: Llama in numpy over a paged KV cache, behind SGLang's HTTP interface.

Its arithmetic does not depend on the batch: for greedy sampling, tokens over a hand-off are those of one engine alone.
"""
