"""Builders: turn a user's object into the Kubernetes objects that realise it.

They return dicts, do no I/O, and make no decisions about time or order.
"""
