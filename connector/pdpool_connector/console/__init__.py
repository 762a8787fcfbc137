"""`pdpool connector …`: what a person asks of connectors, live or after the fact."""
