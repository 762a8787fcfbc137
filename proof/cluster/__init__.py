"""What drills and faults on the local cluster have in common."""
