"""`make bench-operator`: one operator process, and pools of simulated engines on simulated nodes.

The API server, scheduler and controllers are real. kwok plays the kubelets, `engines.py` the processes in the pods.
Each size of fleet has its own namespace and its own operator process.
"""
