"""Entry point of `python -m pdpool_operator`. It handles SIGTERM from its first moment."""

import os
import signal

# Process 1 of a container ignores SIGTERM unless it has a handler. The imports below take seconds on a busy node.
# Nothing has started by then that needs an orderly shutdown.
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

from .process import main  # noqa: E402

if __name__ == "__main__":
    main()
