"""Merge the user's pod template into the one that pdpool renders.

Engines and routers have the same rules; the container is `engine` or `router`. Rules by field:

- `metadata.labels`, `metadata.annotations`: added. Keys of `pdpool.dev/` and labels that pdpool sets are refused.
- `spec.containers` and `spec.initContainers`: by name. Ours is merged as below, others are taken as they are.
- `spec.volumes`: by name. The user's replaces ours.
- `securityContext`: key by key. The user's value wins.
- `spec.terminationGracePeriodSeconds`: refused. pdpool derives it.
- every other field of `spec`: the user's.

Rules within our container:

- `args`: the user's follow ours. A flag that pdpool sets from a typed field is refused.
- `env`: by name; the user's wins. Names that begin with `PDPOOL_` are refused, but for switches
  of the plugins (`PDPOOL_SGLANG_`, `PDPOOL_VLLM_`).
- `ports`: by name. A port of ours with another number is refused.
- `volumeMounts`: by mount path; the user's wins.
- `lifecycle`: key by key. `preStop` is refused if the pod drains by it.
- probes, resources, image, command and every other field: the user's, whole.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..api.names import ENGINE_CONTAINER, GROUP

ROOT = "spec.template"
ENGINE_PATH = f"{ROOT}.spec.containers[{ENGINE_CONTAINER}]"


@dataclass(frozen=True, slots=True)
class MergeRules:
    """What differs between the templates of engines and routers."""

    root: str
    """Path of the user's template within the object."""
    container: str
    """Name of the container that pdpool renders."""
    owned_flags: frozenset[str]
    """Command-line flags that pdpool sets. A template must not set them."""
    flags_from: str
    """Where these flags come from, for messages."""
    grace_period: str
    """What to do instead of setting `terminationGracePeriodSeconds`."""
    pre_stop: str
    """What to do instead of setting `preStop`."""


class TemplateInvalid(ValueError):  # noqa: N818 -- named as the reason that it becomes
    """The user's pod template cannot be merged."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        """Name the field by its path, show its value, and say what would be right."""
        super().__init__(f"{field}: {_shown(value)}: {expected}")
        self.field = field
        self.value = value
        self.expected = expected


def merge_template(ours: dict[str, Any], user: dict[str, Any], rules: MergeRules) -> dict[str, Any]:
    """Merge the user's pod template into pdpool's.

    Args:
        ours: a pod template whose first container is `rules.container`.
        user: the template as the user wrote it, unchecked.
        rules: names and messages.

    Raises:
        TemplateInvalid: for the first error found.
    """
    _only(user, ("metadata", "spec"), rules.root)
    user_meta = object_at(user.get("metadata"), f"{rules.root}.metadata")
    user_spec = object_at(user.get("spec"), f"{rules.root}.spec")
    return {
        "metadata": _merge_metadata(ours["metadata"], user_meta, f"{rules.root}.metadata"),
        "spec": _merge_spec(ours["spec"], user_spec, rules),
    }


def _merge_metadata(ours: dict[str, Any], user: dict[str, Any], path: str) -> dict[str, Any]:
    _only({key: value for key, value in user.items() if value is not None}, ("labels", "annotations"), path)
    merged = dict(ours)
    for field in ("labels", "annotations"):
        mine: dict[str, str] = ours.get(field, {})
        theirs = object_at(user.get(field), f"{path}.{field}")
        for key, value in theirs.items():
            if key in mine or key.startswith(f"{GROUP}/"):
                raise TemplateInvalid(f"{path}.{field}[{key}]", value, "pdpool sets this itself; remove it")
            if not isinstance(value, str):
                raise TemplateInvalid(f"{path}.{field}[{key}]", value, "must be a string; put it in quotes")
        if mine or theirs:
            merged[field] = {**theirs, **mine}
    return merged


def _merge_spec(ours: dict[str, Any], user: dict[str, Any], rules: MergeRules) -> dict[str, Any]:
    path = f"{rules.root}.spec"
    if "terminationGracePeriodSeconds" in user:
        raise TemplateInvalid(
            f"{path}.terminationGracePeriodSeconds",
            user["terminationGracePeriodSeconds"],
            rules.grace_period,
        )
    containers = _named(user.get("containers"), f"{path}.containers")
    main, *others = ours["containers"]
    merged_main = _merge_container(main, containers.pop(rules.container, {}), rules)
    merged = {**ours, **user}
    merged["containers"] = [merged_main, *others, *containers.values()]
    merged["volumes"] = _by_key(ours["volumes"], user.get("volumes"), "name", f"{path}.volumes")
    merged["securityContext"] = {
        **ours["securityContext"],
        **object_at(user.get("securityContext"), f"{path}.securityContext"),
    }
    if "initContainers" in user:
        merged["initContainers"] = list(_named(user["initContainers"], f"{path}.initContainers").values())
    return merged


def _merge_container(ours: dict[str, Any], user: dict[str, Any], rules: MergeRules) -> dict[str, Any]:
    path = f"{rules.root}.spec.containers[{rules.container}]"
    merged = {**ours, **user}
    args = _strings(user.get("args"), f"{path}.args")
    refuse_owned_flags(args, rules, f"{path}.args")
    merged["args"] = [*ours["args"], *args]
    merged["env"] = _by_key(ours["env"], user.get("env"), "name", f"{path}.env", _refuse_own_environment)
    merged["ports"] = _merge_ports(ours["ports"], user.get("ports"), f"{path}.ports")
    merged["volumeMounts"] = _by_key(
        ours["volumeMounts"], user.get("volumeMounts"), "mountPath", f"{path}.volumeMounts"
    )
    merged["securityContext"] = {
        **ours["securityContext"],
        **object_at(user.get("securityContext"), f"{path}.securityContext"),
    }
    lifecycle = object_at(user.get("lifecycle"), f"{path}.lifecycle")
    if "preStop" in lifecycle and "preStop" in ours["lifecycle"]:
        raise TemplateInvalid(f"{path}.lifecycle.preStop", lifecycle["preStop"], rules.pre_stop)
    merged["lifecycle"] = {**lifecycle, **ours["lifecycle"]}
    return merged


def refuse_owned_flags(args: Iterable[str], rules: MergeRules, path: str) -> None:
    """Raise TemplateInvalid for the first flag that pdpool sets itself."""
    for arg in args:
        flag = arg.split("=", 1)[0]
        if flag in rules.owned_flags:
            raise TemplateInvalid(path, arg, f"pdpool sets {flag} from {rules.flags_from}; remove it")
        # Python's argparse takes every unambiguous beginning of a flag for the flag.
        meant = next((name for name in sorted(rules.owned_flags) if len(flag) > 2 and name.startswith(flag)), None)
        if flag.startswith("--") and meant is not None:
            raise TemplateInvalid(path, arg, f"this is short for {meant}, which pdpool sets; remove it")


def _refuse_own_environment(entry: dict[str, Any], _ours: dict[str, Any] | None, path: str) -> None:
    if entry["name"].startswith("PDPOOL_") and not entry["name"].startswith(FOR_USERS):
        raise TemplateInvalid(path, entry["name"], "names that begin with PDPOOL_ are pdpool's; choose another")


def _merge_ports(ours: list[dict[str, Any]], user: object, path: str) -> list[Any]:
    """Merge ports by name. The user's ports may lack a name, as Kubernetes allows."""
    theirs = list_at(user, path)
    nameless = [entry for entry in theirs if isinstance(entry, dict) and "name" not in entry]
    named = [entry for entry in theirs if entry not in nameless]
    return [*_by_key(ours, named, "name", path, _refuse_other_port), *nameless]


def _refuse_other_port(entry: dict[str, Any], ours: dict[str, Any] | None, path: str) -> None:
    if ours is not None and entry.get("containerPort") != ours["containerPort"]:
        raise TemplateInvalid(
            f"{path}[{entry['name']}]", entry.get("containerPort"), f"this port is {ours['containerPort']}; remove it"
        )


FOR_USERS = ("PDPOOL_SGLANG_", "PDPOOL_VLLM_")
"""Switches of the plugins, such as PDPOOL_SGLANG_ANY_VERSION."""

Check = Callable[[dict[str, Any], dict[str, Any] | None, str], None]


def _by_key(ours: list[dict[str, Any]], user: object, key: str, path: str, check: Check | None = None) -> list[Any]:
    """Merge lists of objects by one of their fields.

    The user's entry replaces ours in its place. New entries follow.
    """
    theirs = _named(user, path, key)
    mine = {entry[key]: entry for entry in ours}
    if check is not None:
        for name, entry in theirs.items():
            check(entry, mine.get(name), path)
    return list({**mine, **theirs}.values())


def _named(value: object, path: str, key: str = "name") -> dict[str, dict[str, Any]]:
    """Index a list of objects by their key."""
    result: dict[str, dict[str, Any]] = {}
    for index, entry in enumerate(list_at(value, path)):
        place = f"{path}[{index}]"
        if not isinstance(entry, dict):
            raise TemplateInvalid(place, entry, f"must be an object with a {key}")
        name = entry.get(key)
        if not isinstance(name, str) or not name:
            raise TemplateInvalid(f"{place}.{key}", name, "must be a non-empty string")
        if name in result:
            raise TemplateInvalid(f"{place}.{key}", name, f"occurs twice; every {key} must be unique")
        result[name] = entry
    return result


def _strings(value: object, path: str) -> list[str]:
    result = list_at(value, path)
    for index, entry in enumerate(result):
        if not isinstance(entry, str):
            raise TemplateInvalid(f"{path}[{index}]", entry, "must be a string; put it in quotes")
    return result


def list_at(value: object, path: str) -> list[Any]:
    """Return a list of the template; an absent one is empty. Raise TemplateInvalid if it is none."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise TemplateInvalid(path, value, "must be a list")
    return value


def object_at(value: object, path: str) -> dict[str, Any]:
    """Return an object of the template; an absent one is empty. Raise TemplateInvalid if it is none."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TemplateInvalid(path, value, "must be an object")
    return value


def _only(value: dict[str, Any], allowed: tuple[str, ...], path: str) -> None:
    for key in value:
        if key not in allowed:
            raise TemplateInvalid(f"{path}.{key}", value[key], f"unknown here; {path} has {' and '.join(allowed)}")


def _shown(value: object) -> str:
    """Return the value in a form that is safe for an error message.

    Scalars are shortened. Structures may hold private data, so only their size is shown.
    """
    if isinstance(value, dict | list):
        return f"<{'object' if isinstance(value, dict) else 'list'} of {len(value)}>"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
