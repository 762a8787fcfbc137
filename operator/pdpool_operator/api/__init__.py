"""The API `pdpool.dev/v1alpha1`: typed objects, the names and labels of everything derived from them, reasons, and the
CRDs made from all this.
"""
