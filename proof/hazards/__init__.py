"""`make hazards`: what goes wrong in SGLang's hand-off, tried on ours, on real processes and data planes.

The hazards H1-H37 are those of a catalogue made by reading and breaking SGLang 0.5.23. Each scenario is named after
what goes wrong there. It creates that situation, and observes that the failure does not happen here.
"""
