"""The flight recorder: what went into a machine for one hand-off and what came out, and the proof that it replays."""
