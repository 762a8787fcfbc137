"""`pdpool hwcheck`: moves pages over the hardware of this machine and says what was proved and what was skipped."""
