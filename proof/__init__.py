"""What proves the connector: simulation, fuzzing, hazards, soak, fences, the oracle, benchmarks."""
