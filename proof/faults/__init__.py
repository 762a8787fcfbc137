"""`make faults`: faults on the local cluster, and whether the operator names and repairs them."""
