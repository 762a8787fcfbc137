"""Inputs of the builders besides the user's object."""

from dataclasses import dataclass

from ..api.names import ControlKeys as ControlKeys


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """Images from the operator's environment (`PDPOOL_ENGINE_IMAGE`, `PDPOOL_ROUTER_IMAGE`), and keys."""

    engine_image: str
    """Image for engines of type Reference whose template names none."""
    router_image: str
    curve_keys: str = ""
    """The key file of the control channel that engines of the namespace read."""
    operator_key: str = ""
    """Public key in PEM, which verifies the requests that the operator signs for engines."""
    control_keys: ControlKeys = ControlKeys.REQUIRED
