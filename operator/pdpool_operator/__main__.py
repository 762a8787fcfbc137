"""`python -m pdpool_operator`: what can be told to end from the first moment on."""

import os
import signal

# Process 1 of a container ignores SIGTERM unless it has a handler, and what is imported below takes seconds on a busy
# node. Nothing has begun by then that would have to be ended in order.
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

from .process import main  # noqa: E402

if __name__ == "__main__":
    main()
