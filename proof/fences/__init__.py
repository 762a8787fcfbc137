"""`make fences`: experiments that count bytes which land after the proof that no write is under way."""
