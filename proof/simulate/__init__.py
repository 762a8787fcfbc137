"""`make simulate`: the protocol under every fault, exhaustively for small worlds and at random for larger ones."""
