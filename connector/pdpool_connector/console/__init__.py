"""`pdpool connector …`: commands for people, about connectors that run and about flight records."""
