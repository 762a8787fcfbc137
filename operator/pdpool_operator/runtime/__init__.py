"""Infrastructure of the operator: work queue, leader lease, API client, event recorder, metrics and health endpoints.

Nothing here decides: `plan`, `diagnose` and `status` do.
"""
