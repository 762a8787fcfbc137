"""The model of the engine image: fetched and converted on this machine, put where the Dockerfile copies it from."""

from dev.paths import CHECKOUT
from dev.shell import Clock

# Below the checkout, so that `docker build .` finds it too.
MODEL = CHECKOUT / ".cache/models/smollm2"


def prepare_model(clock: Clock) -> None:
    """Make the converted model if it is not there."""
    MODEL.mkdir(parents=True, exist_ok=True)
