"""Percentiles of a few measured values."""

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed. NaN if there are none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan
