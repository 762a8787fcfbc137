"""Measurements for the docs. They print ratios within one run: absolute figures of a shared machine mean little."""
