"""`make hazards`: what goes wrong in SGLang's hand-off, tried on ours, on real processes and data planes.

The hazards H1-H37 are those of a catalogue made by reading and breaking SGLang 0.5.23; each scenario is named after
what goes wrong there, brings that situation about, and observes that it does not happen here.
"""
