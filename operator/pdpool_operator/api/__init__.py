"""The API `pdpool.dev/v1alpha1`: typed objects, names and labels of derived objects, reasons, generated CRDs."""
