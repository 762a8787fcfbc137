"""Builders: from a user's object to the Kubernetes objects that realise it. Dicts out, no I/O, no decisions about time
or order.
"""
