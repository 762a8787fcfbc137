"""What every process of an engine sets up before it does anything else."""

import logging
import os
import sys


def set_up_process() -> None:
    """Log to stderr, and choose UCX' modules."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # libucx is loaded when NIXL is imported, later than this; its InfiniBand module crashes at exit.
    os.environ.setdefault("UCX_MODULES", "^ib")
