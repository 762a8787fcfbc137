"""`make hazards`: known faults of prefill/decode systems, provoked here on real processes and transfer backends.

docs/hazards.md lists them, H1 to H37. Each scenario brings the situation about and checks that the fault is absent.
"""
