"""pdpool's operator: runs prefill and decode pools, watches their hand-off queues, and repairs them."""
