"""What the builders need beside the user's object."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """Images from the operator's environment (`PDPOOL_ENGINE_IMAGE`, `PDPOOL_ROUTER_IMAGE`)."""

    engine_image: str
    """Image of engines of type Reference whose template names none."""
    router_image: str
