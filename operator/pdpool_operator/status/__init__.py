"""Status: conditions, counts and events as functions of observation, plan and diagnosis. Pure."""
