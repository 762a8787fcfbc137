"""The engine's command line, the same for `pdpool engine` and `python -m pdpool_reference`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from pdpool_connector import CurveKey, TokenVerifier, read_keys
from pdpool_connector.backends import BACKENDS
from pdpool_connector.transport.curve import KeysError

MODES = ("unified", "prefill", "decode")


@dataclass(frozen=True)
class EngineOptions:
    """How one engine runs. Port 0 takes any free port; the engine prints its addresses as one JSON line on stdout."""

    mode: str
    model_path: str
    served_model_name: str
    host: str
    port: int
    bootstrap_port: int
    control_port: int
    admin_port: int
    advertise_host: str
    transfer_backend: str
    kv_pages: int
    tp_size: int
    pp_size: int
    curve: tuple[CurveKey, ...]
    curve_required: bool
    admin_gate: TokenVerifier | None
    pod_uid: str
    admin_socket: Path | None
    flight_dir: Path | None
    enable_faults: bool
    shutdown_grace_s: float


_port = click.IntRange(0, 65535)
_ranks = click.IntRange(1, 64)
_pages = click.IntRange(4, 1 << 20)
_file = click.Path(exists=True, dir_okay=False, path_type=Path)
_grace = click.FloatRange(0, 3600)
_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("--mode", type=click.Choice(MODES), default="unified", envvar="PDPOOL_ROLE", show_default=True),
    click.option("--model-path", required=True, help="Directory of a converted model, or `tiny`: a seeded random one."),
    click.option("--served-model-name", help="Name in answers and metrics.  [default: that of the directory]"),
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
    click.option("--port", type=_port, default=30000, show_default=True, help="HTTP."),
    click.option("--bootstrap-port", type=_port, default=8998, show_default=True, help="Prefill: rendezvous (HTTP)."),
    click.option("--control-port", type=_port, default=8999, show_default=True, help="Hand-off messages (zmq)."),
    click.option("--admin-port", type=_port, default=9400, show_default=True, help="Connector's state and changes."),
    click.option("--advertise-host", envvar="PDPOOL_POD_IP", help="Address for peers.  [default: --host]"),
    click.option("--transfer-backend", type=click.Choice(BACKENDS), default="nixl", show_default=True),
    click.option("--kv-pages", type=_pages, default=2048, show_default=True, help="Pages of 16 tokens."),
    click.option("--tp-size", type=_ranks, default=1, show_default=True, help="Ranks that divide each layer's heads."),
    click.option("--pp-size", type=_ranks, default=1, show_default=True, help="Stages that divide the layers."),
    click.option("--curve-keys", type=_file, help="Keys of the control channel (docs/reference/connector.md)."),
    click.option(
        "--curve-optional", is_flag=True, help="Decode: also connect to prefills without keys, for an upgrade."
    ),
    click.option("--operator-key", type=_file, help="Operator's public key (PEM); it may change the connector."),
    click.option("--pod-uid", default="", envvar="PDPOOL_POD_UID", help="UID of this pod, for peers and tokens."),
    click.option("--admin-socket", type=click.Path(path_type=Path), help="Unix socket for /drain."),
    click.option("--flight-dir", type=click.Path(path_type=Path), help="Folder for a record of each failed hand-off."),
    click.option("--enable-faults", is_flag=True, help="Offer /faults, which breaks this engine for tests."),
    click.option("--shutdown-grace", "shutdown_grace_s", type=_grace, default=30.0, help="Seconds after SIGTERM."),
]


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a click command with the engine's options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def make_options(values: Mapping[str, Any]) -> EngineOptions:
    """Return the options from click's values, with defaults that depend on others. Raises click.UsageError."""
    advertise = values["advertise_host"] or values["host"]
    if values["mode"] != "unified" and advertise in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        message = f"--advertise-host is needed: peers cannot connect to {advertise}"
        raise click.UsageError(message)
    if values["mode"] == "unified" and values["admin_socket"] is not None:
        message = "--admin-socket needs --mode prefill or decode: a unified engine has no connector to drain"
        raise click.UsageError(message)
    name = values["served_model_name"] or Path(values["model_path"]).name
    others = {
        key: value for key, value in values.items() if key not in ("curve_keys", "curve_optional", "operator_key")
    }
    return EngineOptions(
        **{**others, "advertise_host": advertise, "served_model_name": name},
        curve=_keys(values["curve_keys"]),
        curve_required=not values["curve_optional"],
        admin_gate=_gate(values["operator_key"], values["pod_uid"]),
    )


def _keys(path: Path | None) -> tuple[CurveKey, ...]:
    try:
        return read_keys(path) if path is not None else ()
    except KeysError as error:
        raise click.UsageError(f"--curve-keys: {error}") from None


def _gate(path: Path | None, pod_uid: str) -> TokenVerifier | None:
    if path is None:
        return None
    if not pod_uid:
        message = "--pod-uid is needed with --operator-key: tokens name the pod that they are for"
        raise click.UsageError(message)
    try:
        return TokenVerifier(path.read_text(encoding="ascii"), pod_uid)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"--operator-key {path}: {error}") from None
