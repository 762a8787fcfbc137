"""`make bench-connector`: two real connectors in two processes, beside the raw data plane under them.

Every ratio is taken within one run, what is compared measured in turn, so that a busy moment hits both sides of it.
Figures are medians; the spread is the 10th to the 90th percentile.
"""
