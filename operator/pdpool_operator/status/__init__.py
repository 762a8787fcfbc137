"""Status: conditions, counts and events as functions of what was observed, planned and diagnosed. Pure."""
