"""`make faults`: faults on the local cluster, and whether the operator names and mends them."""
