"""The file of `plan`: pools and services as YAML or JSON, read as kubectl reads it."""

import json
from typing import Any, Final

import yaml
from pdpool_operator.api import names
from pdpool_operator.api.pools import POOL_KINDS
from pdpool_operator.api.services import DisaggregatedService

Object = dict[str, Any]

KINDS: Final = (*(kind.kind for kind in POOL_KINDS), DisaggregatedService.kind)
TIMESTAMP: Final = "tag:yaml.org,2002:timestamp"


class FileInvalidError(ValueError):
    """The file is not YAML, or holds something else than objects."""


class _Loader(yaml.SafeLoader):
    """Reads an unquoted date as text, as kubectl does: JSON has no dates."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as in the base class
        first: [(tag, pattern) for tag, pattern in resolvers if tag != TIMESTAMP]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def objects_of(text: str, namespace: str) -> list[Object]:
    """Return the pools and services of YAML or JSON documents, with a namespace each.

    Raises:
        FileInvalidError: the text cannot be read, or has an object of another kind.
    """
    try:
        documents = [one for one in yaml.load_all(text, _Loader) if one is not None]
    except (yaml.YAMLError, ValueError) as error:
        raise FileInvalidError(f"not YAML: {error}") from error
    except RecursionError as error:
        raise FileInvalidError("not YAML that can be read: it is nested too deeply") from error
    if not documents:
        raise FileInvalidError("the file holds no objects")
    return [_object(one, namespace) for one in documents]


def _object(one: object, namespace: str) -> Object:
    meta = one.get("metadata") if isinstance(one, dict) else None
    if not isinstance(one, dict) or not isinstance(meta, dict) or not isinstance(meta.get("name"), str):
        raise FileInvalidError("each document must be an object with kind and metadata.name")
    if not isinstance(one.get("kind"), str) or one["kind"] not in KINDS or one.get("apiVersion") != names.API_VERSION:
        raise FileInvalidError(f"{one.get('kind')} {meta['name']}: the kind must be one of {', '.join(KINDS)}")
    what = f"{one['kind']} {meta['name']}"
    given = meta.get("namespace") or namespace
    if not isinstance(given, str):
        raise FileInvalidError(f"{what}: metadata.namespace must be text, not {given!r}")
    for path, value in (("metadata.annotations", meta.get("annotations")), ("spec", one.get("spec"))):
        if value is not None and not isinstance(value, dict):
            raise FileInvalidError(f"{what}: {path} must be an object, not {value!r}")
    try:
        whole: Object = json.loads(json.dumps(one | {"metadata": meta | {"namespace": given}}))
    except (TypeError, ValueError, RecursionError) as error:
        raise FileInvalidError(f"{what} has a value that JSON has not: {error}") from error
    return whole
