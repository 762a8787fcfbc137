"""`make fences`: experiments that count bytes which land after a proof of quiet would have been claimed."""
