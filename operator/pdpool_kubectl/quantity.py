"""Kubernetes quantities of whole devices."""

_SUFFIXES = {"k": 10**3, "M": 10**6, "Ki": 2**10, "Mi": 2**20}


def amount(quantity: str) -> int:
    """Return a number of devices: `63`, `1k`. What is no number of devices counts as none."""
    for suffix, factor in _SUFFIXES.items():
        if quantity.endswith(suffix) and quantity.removesuffix(suffix).isdecimal():
            return int(quantity.removesuffix(suffix)) * factor
    return int(quantity) if quantity.isdecimal() else 0
