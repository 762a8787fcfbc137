"""One form for all pod templates of a user that mean the same. Only the spec hash uses it; the builders do not.

The API server stores some texts in another form and fills in defaults. So two templates may differ as texts and lead to
equal objects. Rules:

- Quantities have one form: `cpu: 0.02` is `20m`, `memory: 1024Mi` is `1Gi`.

- A field with the default of the API server counts as absent. So does an empty list or map that is merged. Fields for
  which pdpool sets another value have no such default.

- `env` is sorted by name, unless a value contains `$(`. A reference reaches only entries that come earlier. If a name
  occurs twice, the last entry counts, and the list keeps its order.

- Lists without a meaning in their order are sorted: volumes, volumeMounts, ports, tolerations, capabilities.

- The order of `args`, `command`, `envFrom`, `initContainers` and of the containers beside `engine` has a meaning.
"""

import json
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final

from ..api.names import ENGINE_CONTAINER

_SUFFIXES: Final = {
    "": Decimal(1),
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"), 1)},
    **{suffix: Decimal(1024) ** power for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)},
}
_QUANTITY: Final = re.compile(
    r"(?P<number>[+-]?([0-9]{1,30}(\.[0-9]{0,30})?|\.[0-9]{1,30}))([eE](?P<power>[+-]?[0-9]{1,2})|(?P<suffix>[a-zA-Z]{0,2}))"
)

_OFF: Final = False
CONTAINER_DEFAULTS: Final[Mapping[str, Any]] = {
    "terminationMessagePath": "/dev/termination-log",
    "stdin": _OFF,
    "stdinOnce": _OFF,
    "tty": _OFF,
    "workingDir": "",
}
POD_DEFAULTS: Final[Mapping[str, Any]] = {
    "restartPolicy": "Always",
    "dnsPolicy": "ClusterFirst",
    "schedulerName": "default-scheduler",
    "hostNetwork": _OFF,
    "hostPID": _OFF,
    "hostIPC": _OFF,
    "shareProcessNamespace": _OFF,
    "nodeName": "",
    "priorityClassName": "",
}
PROBE_DEFAULTS: Final[Mapping[str, Any]] = {
    "periodSeconds": 10,
    "timeoutSeconds": 1,
    "successThreshold": 1,
    "failureThreshold": 3,
    "initialDelaySeconds": 0,
}
MOUNT_DEFAULTS: Final[Mapping[str, Any]] = {"readOnly": _OFF, "subPath": ""}
MERGED: Final = {"args", "env", "ports", "volumeMounts", "securityContext", "lifecycle", "resources"}
"""Fields of a container that are merged: empty, they are absent. `null` in another field of `engine` removes ours."""


def canonical_template(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template in its one form. A part that is malformed stays as it is."""
    result = {key: value for key, value in template.items() if value not in (None, {})}
    if isinstance(metadata := result.get("metadata"), dict):
        result["metadata"] = {key: value for key, value in metadata.items() if value not in (None, {})}
    if isinstance(spec := result.get("spec"), dict):
        result["spec"] = _pod(spec)
    return {key: value for key, value in result.items() if value != {}}


def quantity(value: object) -> object:
    """Return a quantity as a decimal number in plain digits, or the value itself if it is none."""
    match = _QUANTITY.fullmatch(str(value)) if isinstance(value, str | int | float) else None
    suffix = (match["suffix"] or "") if match else ""
    if match is None or isinstance(value, bool) or suffix not in _SUFFIXES:
        return value
    number = Decimal(match["number"]) * _SUFFIXES[suffix] * Decimal(10) ** int(match["power"] or 0)
    plain = f"{number:f}"
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


def _pod(spec: Mapping[str, Any]) -> dict[str, Any]:
    result = _without(spec, POD_DEFAULTS)
    for key in ("containers", "volumes", "securityContext", "initContainers", "tolerations", "nodeSelector"):
        if result.get(key, ...) in (None, [], {}):
            del result[key]
    _each(result, "initContainers", _container)
    _each(result, "containers", _container)
    _each(result, "volumes", _volume)
    _sort(result, "volumes", lambda volume: str(volume.get("name")))
    _sort(result, "tolerations", _text)
    if isinstance(containers := result.get("containers"), list):
        result["containers"] = sorted(containers, key=lambda one: not _is_engine(one))
    if isinstance(overhead := result.get("overhead"), dict):
        result["overhead"] = {key: quantity(value) for key, value in overhead.items()}
    if "resources" in result:
        result["resources"] = _resources(result["resources"])
    return result


def _container(container: dict[str, Any]) -> dict[str, Any]:
    result = _without(container, CONTAINER_DEFAULTS)
    if not _is_engine(container):  # pdpool sets another value for the engine
        result = _without(result, {"terminationMessagePolicy": "File"})
        result = {key: value for key, value in result.items() if value is not None}
    result = {key: value for key, value in result.items() if not (key in MERGED and value in (None, [], {}))}
    if result.get("imagePullPolicy") == _pull_policy(container.get("image"), engine=_is_engine(container)):
        del result["imagePullPolicy"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if isinstance(value := result.get(probe), dict):
            result[probe] = _probe(value)
    _each(result, "env", _env)
    _each(result, "ports", lambda port: _without(port, {"protocol": "TCP"}))
    _each(result, "volumeMounts", lambda mount: _without(mount, MOUNT_DEFAULTS))
    if _order_is_free(result.get("env")):
        _sort(result, "env", lambda entry: str(entry["name"]))
    _sort(result, "ports", _text)
    _sort(result, "volumeMounts", lambda mount: str(mount.get("mountPath")))
    if "resources" in result:
        result["resources"] = _resources(result["resources"])
    if isinstance(security := result.get("securityContext"), dict):
        result["securityContext"] = _security(security)
    return result


def _is_engine(container: object) -> bool:
    return isinstance(container, dict) and container.get("name") == ENGINE_CONTAINER


def _pull_policy(image: object, *, engine: bool) -> str:
    """Return the policy that the API server sets for an image.

    Empty without an image of the engine: the operator's settings give both the image and the policy.
    """
    if not isinstance(image, str) or not image:
        return "" if engine else "Always"
    if "@" in image:
        return "IfNotPresent"
    tag = image.rpartition("/")[2].partition(":")[2] or "latest"
    return "Always" if tag == "latest" else "IfNotPresent"


def _probe(probe: dict[str, Any]) -> dict[str, Any]:
    result = _without(probe, PROBE_DEFAULTS)
    if isinstance(http := result.get("httpGet"), dict):
        result["httpGet"] = _without(http, {"scheme": "HTTP", "path": "/"})
    return result


def _env(entry: dict[str, Any]) -> dict[str, Any]:
    result = {key: value for key, value in entry.items() if value is not None and (key, value) != ("value", "")}
    source = result.get("valueFrom")
    if not isinstance(source, dict):
        return result
    source = dict(source)
    if isinstance(field := source.get("fieldRef"), dict):
        source["fieldRef"] = _without(field, {"apiVersion": "v1"})
    if isinstance(resource := source.get("resourceFieldRef"), dict):
        resource = resource | ({"divisor": quantity(resource["divisor"])} if "divisor" in resource else {})
        source["resourceFieldRef"] = _without(resource, {"divisor": "0"})
    return {**result, "valueFrom": source}


def _order_is_free(env: object) -> bool:
    """Whether the order of the entries has no meaning."""
    if not isinstance(env, list) or not all(isinstance(entry, dict) and "name" in entry for entry in env):
        return False
    unique = len({str(entry["name"]) for entry in env}) == len(env)
    return unique and not any("$(" in str(entry.get("value", "")) for entry in env)


def _volume(volume: dict[str, Any]) -> dict[str, Any]:
    result = dict(volume)
    for source, defaults in (
        ("secret", {"defaultMode": 0o644}),
        ("configMap", {"defaultMode": 0o644}),
        ("projected", {"defaultMode": 0o644}),
        ("downwardAPI", {"defaultMode": 0o644}),
        ("hostPath", {"type": ""}),
        ("persistentVolumeClaim", {"readOnly": _OFF}),
        ("emptyDir", {"medium": ""}),
    ):
        if isinstance(value := result.get(source), dict):
            result[source] = _without(value, defaults)
    if isinstance(empty := result.get("emptyDir"), dict) and "sizeLimit" in empty:
        result["emptyDir"] = {**empty, "sizeLimit": quantity(empty["sizeLimit"])}
    return result


def _resources(resources: object) -> object:
    if not isinstance(resources, dict):
        return resources
    result = dict(resources)
    for part in ("limits", "requests"):
        if isinstance(amounts := result.get(part), dict):
            result[part] = {name: quantity(amount) for name, amount in amounts.items()}
    return {key: value for key, value in result.items() if value not in (None, {}, [])}


def _security(security: dict[str, Any]) -> dict[str, Any]:
    result = dict(security)
    if isinstance(capabilities := result.get("capabilities"), dict):
        result["capabilities"] = {
            key: sorted(map(str, names)) if isinstance(names, list) else names for key, names in capabilities.items()
        }
    return result


def _without(value: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that do not have their default. 0 and False are different values here."""
    return {key: one for key, one in value.items() if key not in defaults or _text(one) != _text(defaults[key])}


def _each(value: dict[str, Any], key: str, form: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    if isinstance(items := value.get(key), list):
        value[key] = [form(item) if isinstance(item, dict) else item for item in items]


def _sort(value: dict[str, Any], key: str, by: Callable[[dict[str, Any]], str]) -> None:
    if isinstance(items := value.get(key), list) and all(isinstance(item, dict) for item in items):
        value[key] = sorted(items, key=by)


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)
