"""The environment variables that pdpool's pods set, read into fields of `ConnectorConfig`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from pdpool_connector.backends import BACKENDS
from pdpool_connector.transport.curve import read_keys
from pdpool_connector.transport.tokens import TokenVerifier


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise ValueError("give a TCP port, 0 (any free port) to 65535")
    return int(text)


def _flag(text: str) -> bool:
    known = {"1": True, "true": True, "0": False, "false": False}
    if text.lower() not in known:
        raise ValueError("give true or false")
    return known[text.lower()]


def _backend(text: str) -> str:
    if text not in BACKENDS:
        raise ValueError(f"give one of {', '.join(BACKENDS)}")
    return text


VARIABLES: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "PDPOOL_ADVERTISE_HOST": ("advertise_host", str),
    "PDPOOL_CONTROL_PORT": ("control_port", _port),
    "PDPOOL_ADMIN_PORT": ("admin_port", _port),
    "PDPOOL_BOOTSTRAP_PORT": ("bootstrap_port", _port),
    "PDPOOL_TRANSFER_BACKEND": ("backend", _backend),
    "PDPOOL_CURVE_KEYS": ("curve", read_keys),
    "PDPOOL_CURVE_REQUIRED": ("curve_required", _flag),
    "PDPOOL_POD_UID": ("pod_uid", str),
    "PDPOOL_FLIGHT_DIR": ("flight_dir", Path),
    "PDPOOL_ADMIN_SOCKET": ("admin_socket", Path),
}
"""Field of the configuration and reader of the text, by variable.

Two more are read: PDPOOL_POD_IP in place of a missing PDPOOL_ADVERTISE_HOST, and PDPOOL_OPERATOR_KEY, a file with the
operator's public key, which needs PDPOOL_POD_UID.
"""


ENGINE_BACKEND: Final = "nixl"
"""The connector's own default is `local`, which cannot move memory that an engine has allocated."""


def engine_variables(environ: Mapping[str, str], *, host: str, pod_rank: int) -> dict[str, str]:
    """Return the variables of one of a pod's connectors, for an engine that allocates its own memory.

    Every connector of a pod has the control port and the admin port plus its number in the pod, and its own admin
    socket.

    Args:
        environ: The variables of the pod.
        host: Address of this process for peers, unless the variables name one.
        pod_rank: Number of the connector in its pod.
    """
    found = dict(environ)
    found["PDPOOL_TRANSFER_BACKEND"] = environ.get("PDPOOL_TRANSFER_BACKEND") or ENGINE_BACKEND
    if not found.get("PDPOOL_ADVERTISE_HOST") and not found.get("PDPOOL_POD_IP"):
        found["PDPOOL_ADVERTISE_HOST"] = host
    for name in ("PDPOOL_CONTROL_PORT", "PDPOOL_ADMIN_PORT"):
        text = found.get(name, "")
        if text.isascii() and text.isdigit() and int(text):
            found[name] = str(int(text) + pod_rank)
    if pod_rank and (socket := found.get("PDPOOL_ADMIN_SOCKET")):
        found["PDPOOL_ADMIN_SOCKET"] = f"{socket}.{pod_rank}"
    return found


def read_environment(environ: Mapping[str, str], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields that variables give and `overrides` does not; a variable that is empty counts as not set.

    Raises:
        ValueError: Names the variable, its value and what would be right.
    """
    fields: dict[str, Any] = {}
    for variable, (field, read) in VARIABLES.items():
        if field not in overrides and (text := environ.get(variable)):
            fields[field] = _read(variable, text, read)
    if "advertise_host" not in fields and "advertise_host" not in overrides:
        if not (address := environ.get("PDPOOL_POD_IP")):
            raise ValueError(
                "PDPOOL_ADVERTISE_HOST and PDPOOL_POD_IP are not set: "
                "give one of them, the address at which peers reach this process"
            )
        fields["advertise_host"] = address
    if "admin_gate" not in overrides and (path := environ.get("PDPOOL_OPERATOR_KEY")):
        pod_uid = overrides.get("pod_uid") or fields.get("pod_uid")
        if not pod_uid:
            raise ValueError(
                f"PDPOOL_POD_UID is not set: PDPOOL_OPERATOR_KEY={path!r} needs the UID of the pod, which tokens name"
            )
        fields["admin_gate"] = _read("PDPOOL_OPERATOR_KEY", path, lambda text: _verifier(text, pod_uid))
    return fields


def _verifier(path: str, pod_uid: str) -> TokenVerifier:
    try:
        key = Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"give a file with the operator's public key: {error}") from None
    return TokenVerifier(key, pod_uid)


def _read(variable: str, text: str, read: Callable[[str], Any]) -> Any:  # noqa: ANN401 - any field's type
    try:
        return read(text)
    except ValueError as error:
        raise ValueError(f"{variable}={text!r}: {error}") from None
