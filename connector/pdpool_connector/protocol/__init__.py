"""The hand-off protocol as pure state machines: frames, events, effects, transitions; no sockets, threads or clocks."""
