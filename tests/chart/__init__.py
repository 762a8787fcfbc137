"""The chart as Helm renders it, without a cluster: values to objects, refusals, and its alert rules under promtool."""
