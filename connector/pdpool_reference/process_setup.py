"""What every process of an engine sets up before it does anything else."""

import logging
import sys


def set_up_process() -> None:
    """Log to stderr."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
