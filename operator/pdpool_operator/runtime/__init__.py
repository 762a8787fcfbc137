"""Infrastructure of the operator: work queue, leader lease, API client, event recorder, metrics and health endpoints.

Nothing here knows what a pool is. `plan`, `diagnose` and `status` make the decisions.
"""
