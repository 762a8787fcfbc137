"""What the operator runs on: work queue, leader lease, API client, event recorder, metrics and health endpoints.

Nothing here knows what a pool is; decisions live in `plan`, `diagnose` and `status`.
"""
