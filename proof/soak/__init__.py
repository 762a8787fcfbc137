"""`make soak`: aborted hand-offs in great number between real processes, and a watch over every byte of their pages."""
