"""What the builders need beside the user's object."""

from dataclasses import dataclass
from enum import StrEnum


class ControlKeys(StrEnum):
    """Whether engines have keys for the control channel. Value of the annotation `pdpool.dev/control-keys`."""

    REQUIRED = "required"
    OPTIONAL = "optional"
    """Decode: with keys, and reaching prefills without them too."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """Images from the operator's environment (`PDPOOL_ENGINE_IMAGE`, `PDPOOL_ROUTER_IMAGE`), and keys."""

    engine_image: str
    """Image of engines of type Reference whose template names none."""
    router_image: str
    curve_keys: str = ""
    """Keys of the control channel of engines in the namespace: the file that they read."""
    operator_key: str = ""
    """Public half of the key with which the operator signs what it asks of engines, PEM."""
    control_keys: ControlKeys = ControlKeys.REQUIRED
