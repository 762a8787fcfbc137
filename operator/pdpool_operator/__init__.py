"""The Kubernetes operator of pdpool: runs prefill and decode pools, watches their hand-off queues, repairs them."""
