"""What runs beside or before the engine in its pod: today the drain that a preStop hook calls."""
