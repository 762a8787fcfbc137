"""A thin client for the Kubernetes API: plain dicts in and out, a deadline on every call, typed errors.

It uses `kubernetes.aio` for credentials, certificates and token rotation. The client repeats no call, because callers
are level-triggered and try again by themselves.
"""

import asyncio
import json
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio import config as kubeconfig
from kubernetes.aio.client import ApiClient, Configuration

from ..api.names import FIELD_MANAGER, STATUS_FIELD_MANAGER

REQUEST_TIMEOUT_S = 10.0
PAGE_LIMIT = 500
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
LINE_LIMIT = 16 << 20
"""Bytes of one event of a watch. The API server stores objects of at most 1.5 MiB."""
PART_BYTES = 1 << 16
ERROR_BYTES = 1 << 20
HISTORY_S = 5
"""Seconds for which the API server keeps a history request open. Remembered events arrive at once."""

NOT_OF_THE_SCHEMA = ("failed to create typed patch object", "failed to convert new ")
"""Prefixes of the messages of a 500 by which the API server rejects an object that server-side apply cannot read.

Such an object has an unknown field, or a number in place of a string (apimachinery,
managedfields/internal/structuredmerge.go).
"""

Object = dict[str, Any]
Objects = list[Object]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resource:
    """A resource of the API."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        """Return `group/version`, or the version alone for the core group."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the URL path. Without a namespace it is that of the whole cluster."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part is not None]
        return "/" + "/".join(quote(part, safe="") for part in parts)


PODS = Resource("", "v1", "pods", "Pod")
SERVICES = Resource("", "v1", "services", "Service")
SECRETS = Resource("", "v1", "secrets", "Secret")
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
STATEFUL_SETS = Resource("apps", "v1", "statefulsets", "StatefulSet")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
REPLICA_SETS = Resource("apps", "v1", "replicasets", "ReplicaSet")
DISRUPTION_BUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
NETWORK_POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
NODES = Resource("", "v1", "nodes", "Node")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
EVENTS = Resource("events.k8s.io", "v1", "events", "Event")
OPENAPI = Resource("", "v3", "openapi", "OpenAPI")
"""Names the API server's description of itself in metrics. Every authenticated user may read it."""


class ApiError(Exception):
    """The API server answered with an error. `message` is in its own words."""

    def __init__(self, status: int, reason: str, message: str, what: str) -> None:
        super().__init__(f"{what}: {message or reason} ({status})")
        self.status = status
        self.reason = reason
        self.message = message


class NotFoundError(ApiError):
    """404: no such object."""


class ConflictError(ApiError):
    """409: a precondition failed, or another writer was faster."""


class GoneError(ApiError):
    """410: the history of the API server does not reach back that far."""


class InvalidError(ApiError):
    """400 or 422: the object is rejected."""


class ForbiddenError(ApiError):
    """401 or 403: not allowed, possibly by quota or an admission policy."""


class UnavailableError(ApiError):
    """The server is busy, unreachable or too slow. The outcome of a write is unknown."""


class NameConflictError(Exception):
    """A foreign object exists under a name that we need."""

    def __init__(self, kind: str, name: str, owner: str) -> None:
        super().__init__(f"{kind} {name} exists and belongs to {owner}; rename or delete one of the two")
        self.kind = kind
        self.name = name


class NotLeaderError(Exception):
    """This process may not write now."""


def _error(status: int, body: bytes, what: str) -> ApiError:
    try:
        answer = json.loads(body)
        reason, message = str(answer.get("reason", "")), str(answer.get("message", ""))
    except (ValueError, AttributeError):
        reason, message = "", body[:200].decode(errors="replace")
    kinds: dict[int, type[ApiError]] = {
        400: InvalidError,
        401: ForbiddenError,
        403: ForbiddenError,
        404: NotFoundError,
        409: ConflictError,
        410: GoneError,
        422: InvalidError,
        429: UnavailableError,
    }
    kind = kinds.get(status, UnavailableError if status >= 500 else ApiError)
    if status == 500 and message.startswith(NOT_OF_THE_SCHEMA):
        kind = InvalidError
    return kind(status, reason, message, what)


def within_budget(write_budget: Callable[[], float], what: str) -> float:
    """Return the seconds within which a change that begins now must end.

    Raises:
        NotLeaderError: the change may not begin.
    """
    budget = write_budget()
    if budget <= 0:
        raise NotLeaderError(f"{what} was not sent: another operator may be the leader")
    return budget


def _parsed(body: bytes, what: str) -> Object:
    """Return the object in an answer. Any other content comes from a proxy and counts as no answer."""
    try:
        parsed = json.loads(body)
    except ValueError as error:
        raise UnavailableError(0, "NoJSON", str(error), what) from error
    if not isinstance(parsed, dict):
        raise UnavailableError(0, "NoObject", f"{type(parsed).__name__} instead of an object", what)
    return parsed


def _always() -> float:
    return math.inf


class Api:
    """The API calls that the operator makes.

    Args:
        client: Sends the requests.
        timeout_s: Deadline of each call, in seconds.
        write_budget: Returns the seconds that a write may take. With 0, the call raises NotLeaderError.
        on_call: Called for every call with verb, plural, HTTP status (0 if there was none) and seconds.
        on_stored: Called with each object that a write has stored.
        on_deleted: Called with resource, namespace, name and UID of each object that a call has deleted.
        user_agent: Name of this program in the API server's audit log.
    """

    def __init__(
        self,
        client: ApiClient,
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
        write_budget: Callable[[], float] = _always,
        on_call: Callable[[str, str, int, float], None] = lambda *_: None,
        on_stored: Callable[[Resource, Object], None] = lambda *_: None,
        on_deleted: Callable[[Resource, str, str, str], None] = lambda *_: None,
        user_agent: str = "pdpool-operator",
    ) -> None:
        self._user_agent = user_agent
        self._on_stored, self._on_deleted = on_stored, on_deleted
        self._client: Any = client  # its methods have no annotations
        self._timeout_s = timeout_s
        self._write_budget = write_budget
        self._on_call = on_call

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        """Return the object, or None. A Node has no namespace."""
        return await self.read(resource, resource.path(namespace, name))

    async def list(
        self,
        resource: Resource,
        namespace: str | None,
        labels: str = "",
        fields: str = "",
        *,
        metadata_only: bool = False,
    ) -> AsyncIterator[Object]:
        """Yield all objects that match the selectors, page by page, as they are now (never from a cache).

        Items carry `apiVersion` and `kind`, which the server leaves out in lists. For pods, reading only metadata costs
        less than half.
        """
        accept = METADATA_ONLY if metadata_only else "application/json"
        selectors = {"labelSelector": labels, "fieldSelector": fields}
        query = {"limit": str(PAGE_LIMIT)} | {key: value for key, value in selectors.items() if value}
        while True:
            page = await self._call("list", resource, resource.path(namespace), query=query, accept=accept)
            for item in page["items"] or ():  # null if only metadata is requested and no object exists
                yield item | {"apiVersion": resource.api_version, "kind": resource.kind}
            token = page["metadata"].get("continue")
            if not token:
                return
            query["continue"] = token

    async def whole_list(self, resource: Resource, namespace: str | None, labels: str) -> tuple[Objects, str]:
        """Return all objects of one state of the cluster, and its resourceVersion.

        Raises:
            GoneError: the API server forgot that state before the last page was read.
        """
        query = {"limit": str(PAGE_LIMIT)} | ({"labelSelector": labels} if labels else {})
        found: Objects = []
        while True:
            page = await self._call("list", resource, resource.path(namespace), query=query)
            if not isinstance(items := page.get("items") or [], list) or "metadata" not in page:
                raise UnavailableError(0, "NoList", "the answer is not a list", f"list {resource.path(namespace)}")
            found += [item | {"apiVersion": resource.api_version, "kind": resource.kind} for item in items]
            query["continue"] = page["metadata"].get("continue") or ""
            if not query["continue"]:
                return found, str(page["metadata"]["resourceVersion"])

    async def watch(
        self,
        resource: Resource,
        namespace: str | None,
        labels: str,
        since: str,
        *,
        seconds: int,
        silent_s: float,
        opened: Callable[[], None],
    ) -> AsyncIterator[Object]:
        """Yield the changes after the resourceVersion `since`, and bookmarks, for at most `seconds`.

        Every event is a dict with `type` and `object`. The object has a resourceVersion. `opened` is called when the
        API server has accepted the watch.

        Raises:
            GoneError: the watch cannot go on; list again.
            UnavailableError: the connection broke, or nothing came for `silent_s`. It may be resumed.
        """
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": since,
            "timeoutSeconds": str(seconds),
        } | ({"labelSelector": labels} if labels else {})
        path = resource.path(namespace)
        what, started, status = f"watch {path}", time.monotonic(), 0
        timeout = aiohttp.ClientTimeout(total=seconds + silent_s, sock_read=silent_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._request("GET", path, query, timeout)
            async with answer:
                status = answer.status
                if status != 200:
                    raise _error(status, await answer.read(), what)
                opened()
                async for line in _lines(answer.content, what):
                    yield _event(line, what)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnavailableError(0, type(error).__name__, str(error) or "no answer in time", what) from error
        finally:
            self._on_call("watch", resource.plural, status, time.monotonic() - started)

    async def read(self, resource: Resource, path: str) -> Object | None:
        """Return the object at a path, or None."""
        try:
            return await self._call("get", resource, path)
        except NotFoundError:
            return None

    async def text(self, resource: Resource, path: str, *, take: Callable[[bytes], bytes] = bytes) -> str:
        """Return the text at a path, such as that of a pod behind the API server's proxy.

        `take` gets each part of the answer, and returns what is kept of it. It may raise, which ends the call.
        """
        answer = await self._send("get", resource, path, accept="*/*", take=take)
        return answer.decode(errors="replace")

    async def openapi(self, group: str, version: str) -> Object:
        """Return the OpenAPI v3 document of a group and version."""
        return await self._call("get", OPENAPI, f"/openapi/v3/apis/{quote(group)}/{quote(version)}")

    async def history(self, resource: Resource, namespace: str | None, labels: str, since: str) -> tuple[Object, ...]:
        """Return the states that matching objects have had after the resourceVersion `since`, in order.

        The last state of a deleted object is its state at deletion.

        Raises:
            GoneError: the history of the API server does not reach back that far.
        """
        query = {
            "watch": "1",
            "resourceVersion": since,
            "timeoutSeconds": str(HISTORY_S),
            "labelSelector": labels,
        }
        path = resource.path(namespace)
        told = await self._send("watch", resource, path, query=query)
        events = [_parsed(line, f"watch {path}") for line in told.splitlines() if line.strip()]
        for event in events:
            if event["type"] == "ERROR":
                status = event["object"]
                raise _error(int(status.get("code", 0)), json.dumps(status).encode(), f"watch {path}")
        return tuple(event["object"] for event in events)

    async def apply(self, resource: Resource, body: Mapping[str, Any], *, dry_run: bool = False) -> Object:
        """Apply a child object server-side. `body` is our complete intent, with the owner reference that makes it ours.

        An existing object is changed only if its controller is the one in `body`. Its uid is a precondition, so that an
        object of the same name that was created meanwhile stays unchanged.

        Raises:
            NameConflictError: the existing object has another controller.
        """
        metadata = body["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        live = await self.get(resource, namespace, name)
        intent, force = dict(body), False
        if live is not None:
            ours, theirs = controller_uid(body), controller_uid(live)
            if ours is None or theirs != ours:
                raise NameConflictError(resource.kind, name, _owner_in_words(live))
            intent, force = {**body, "metadata": {**metadata, "uid": live["metadata"]["uid"]}}, True
        query = {"fieldManager": FIELD_MANAGER, "force": "true" if force else "false"}
        if dry_run:
            query["dryRun"] = "All"
        return await self._write("patch", resource, resource.path(namespace, name), intent, query)

    async def apply_unread(self, resource: Resource, body: Mapping[str, Any]) -> Object:
        """Apply a child object server-side that this process may write but not read (a Secret).

        A dry run shows the field managers of an existing object.

        Raises:
            NameConflictError: a foreign object exists under this name.
        """
        metadata = body["metadata"]
        path = resource.path(metadata["namespace"], metadata["name"])
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        preview = await self._write("patch", resource, path, body, query | {"dryRun": "All"})
        for entry in preview["metadata"].get("managedFields") or ():
            if entry.get("manager") != FIELD_MANAGER and "f:data" in entry.get("fieldsV1", {}):
                raise NameConflictError(resource.kind, metadata["name"], f"the field manager {entry.get('manager')}")
        return await self._write("patch", resource, path, body, query)

    async def apply_status(self, resource: Resource, live: Mapping[str, Any], status: Mapping[str, Any]) -> Object:
        """Write the whole status of the object `live`, if it still has the same uid."""
        meta = live["metadata"]
        body = {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "metadata": {"name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]},
            "status": status,
        }
        path = resource.path(meta["namespace"], meta["name"], "status")
        return await self._write("patch", resource, path, body, {"fieldManager": STATUS_FIELD_MANAGER, "force": "true"})

    async def delete(
        self, resource: Resource, namespace: str, name: str, uid: str, grace_period_s: int | None = None
    ) -> None:
        """Delete the object of this uid. Nothing happens if it is gone or another object has its name."""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        if grace_period_s is not None:
            options["gracePeriodSeconds"] = grace_period_s
        try:
            answer = await self._write(
                "delete", resource, resource.path(namespace, name), options, {"propagationPolicy": "Background"}
            )
            if answer.get("kind") == "Status":  # otherwise it is the object, which ends later
                self._on_deleted(resource, namespace, name, uid)
        except (NotFoundError, ConflictError) as gone:
            log.debug("not deleted: %s", gone)

    async def adopt(self, resource: Resource, namespace: str, name: str, uid: str, owner: Mapping[str, Any]) -> None:
        """Add an owner reference to an object of this uid.

        Nothing happens if the object is gone. The API server refuses a second controller.
        """
        metadata = {"ownerReferences": [owner], "uid": uid}
        try:
            await self._write(
                "patch",
                resource,
                resource.path(namespace, name),
                {"metadata": metadata},
                {"fieldManager": FIELD_MANAGER},
                content="application/strategic-merge-patch+json",
            )
        except NotFoundError as gone:
            log.debug("not adopted: %s", gone)

    async def create(self, resource: Resource, body: Mapping[str, Any]) -> Object:
        """Create an object that must not exist yet. One without a namespace belongs to the whole cluster."""
        path = resource.path(body["metadata"].get("namespace"))
        return await self._write("create", resource, path, body, {"fieldManager": FIELD_MANAGER})

    async def replace(self, resource: Resource, body: Mapping[str, Any]) -> Object:
        """Replace an object. `metadata.resourceVersion` is the precondition."""
        meta = body["metadata"]
        path = resource.path(meta["namespace"], meta["name"])
        return await self._write("update", resource, path, body, {"fieldManager": FIELD_MANAGER})

    async def merge(self, resource: Resource, namespace: str, name: str, patch: Mapping[str, Any]) -> Object:
        """Merge-patch an object."""
        path = resource.path(namespace, name)
        query = {"fieldManager": FIELD_MANAGER}
        return await self._write("patch", resource, path, patch, query, content="application/merge-patch+json")

    async def try_create(self, resource: Resource, body: Mapping[str, Any]) -> None:
        """Let the API server check an apply that would create an object. Nothing is stored."""
        meta = body["metadata"]
        query = {"fieldManager": self._user_agent, "dryRun": "All", "fieldValidation": "Strict"}
        await self._write("patch", resource, resource.path(meta["namespace"], meta["name"]), body, query)

    async def try_merge(self, resource: Resource, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        """Let the API server check a merge patch. Nothing is stored."""
        query = {"fieldManager": self._user_agent, "dryRun": "All", "fieldValidation": "Strict"}
        path = resource.path(namespace, name)
        await self._write("patch", resource, path, patch, query, content="application/merge-patch+json")

    async def _write(
        self,
        verb: str,
        resource: Resource,
        path: str,
        body: Mapping[str, Any],
        query: Mapping[str, str],
        *,
        content: str = "application/apply-patch+yaml",
    ) -> Object:
        budget = within_budget(self._write_budget, f"{verb} {path}")
        stored = await self._call(verb, resource, path, body=body, query=query, content=content, budget_s=budget)
        if "dryRun" not in query and stored.get("kind") != "Status":
            self._on_stored(resource, stored)
        return stored

    async def _call(
        self,
        verb: str,
        resource: Resource,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content: str = "application/json",
        accept: str = "application/json",
        budget_s: float = math.inf,
    ) -> Object:
        answer = await self._send(
            verb, resource, path, query=query, body=body, content=content, accept=accept, budget_s=budget_s
        )
        return _parsed(answer, f"{verb} {path}")

    async def _send(
        self,
        verb: str,
        resource: Resource,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content: str = "application/json",
        accept: str = "application/json",
        budget_s: float = math.inf,
        take: Callable[[bytes], bytes] = bytes,
    ) -> bytes:
        timeout_s = min(self._timeout_s, budget_s)
        method = {"create": "POST", "update": "PUT", "patch": "PATCH", "delete": "DELETE"}.get(verb, "GET")
        what, started, status = f"{verb} {path}", time.monotonic(), 0
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            answer = await self._request(method, path, query, timeout, body=body, content=content, accept=accept)
            data = await (_body(answer, take) if 200 <= answer.status < 300 else _error_body(answer))
            status = answer.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = f"no answer within {timeout_s:.1f} s" if isinstance(error, TimeoutError) else str(error)
            raise UnavailableError(0, type(error).__name__, reason, what) from error
        finally:
            self._on_call(verb, resource.plural, status, time.monotonic() - started)
        if not 200 <= status < 300:
            raise _error(status, data, what)
        return data

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        within: aiohttp.ClientTimeout,
        *,
        body: Mapping[str, Any] | None = None,
        content: str = "application/json",
        accept: str = "application/json",
    ) -> aiohttp.ClientResponse:
        headers = {
            "Accept": accept,
            "Content-Type": content if method == "PATCH" else "application/json",
            "User-Agent": self._user_agent,
        }
        await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        url = self._client.configuration.host + path + (f"?{urlencode(query)}" if query else "")
        answer = await self._client.rest_client.request(
            method, url, headers=headers, body=body, _request_timeout=within
        )
        response: aiohttp.ClientResponse = answer.response
        return response


async def _body(answer: aiohttp.ClientResponse, take: Callable[[bytes], bytes]) -> bytes:
    """Return what `take` keeps of a body."""
    kept = bytearray()
    async with answer:  # closes the connection if not all was read
        async for part in answer.content.iter_chunked(PART_BYTES):
            kept += take(part)
    return bytes(kept)


async def _error_body(answer: aiohttp.ClientResponse) -> bytes:
    """Return the body of a refusal, at most `ERROR_BYTES`: behind the proxy, it is a pod's own."""
    body = bytearray()
    async with answer:
        async for part in answer.content.iter_chunked(PART_BYTES):
            body += part
            if len(body) > ERROR_BYTES:
                break
    return bytes(body[:ERROR_BYTES])


async def _lines(content: aiohttp.StreamReader, what: str) -> AsyncIterator[bytes]:
    """Yield complete lines. The last one may lack its end; a half one is no JSON."""
    buffer = bytearray()
    async for chunk in content.iter_any():
        buffer += chunk
        *lines, rest = bytes(buffer).split(b"\n") if b"\n" in chunk else [bytes(buffer)]
        if len(rest) > LINE_LIMIT:
            raise UnavailableError(0, "TooLong", f"an event has more than {LINE_LIMIT} bytes", what)
        for line in lines:
            if line.strip():
                yield line
        buffer = bytearray(rest)
    if buffer.strip():
        yield bytes(buffer)


def _event(line: bytes, what: str) -> Object:
    """Return an event of a watch."""
    event = _parsed(line, what)
    match event:
        case {"type": "ERROR", "object": status}:
            message = status.get("message", "") if isinstance(status, dict) else str(status)
            raise GoneError(410, "WatchError", message, what)
        case {"type": str(), "object": {"metadata": {"resourceVersion": str()}}}:
            return event
    raise UnavailableError(0, "NoEvent", f"not an event of a watch: {line[:100]!r}", what)


def controller_uid(obj: Mapping[str, Any]) -> str | None:
    """Return the uid of the object's controlling owner."""
    for owner in obj["metadata"].get("ownerReferences") or ():
        if owner.get("controller"):
            return str(owner["uid"])
    return None


def _owner_in_words(obj: Mapping[str, Any]) -> str:
    for owner in obj["metadata"].get("ownerReferences") or ():
        if owner.get("controller"):
            return f"{owner['kind']} {owner['name']}"
    return "an unknown owner"


async def connect(config_file: str | None = None, context: str | None = None) -> ApiClient:
    """Return a client: by the service account in a pod, by KUBECONFIG (or ~/.kube/config) elsewhere.

    A file or context that is named is used everywhere.
    """
    configuration = Configuration()
    configuration.connection_pool_maxsize = 0  # no limit: each watch keeps a connection
    chosen = config_file or context or os.environ.get("KUBECONFIG")
    if os.environ.get("KUBERNETES_SERVICE_HOST") and not chosen:
        kubeconfig.load_incluster_config(configuration)  # type: ignore[no-untyped-call]
    else:
        await kubeconfig.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=config_file, context=context, client_configuration=configuration
        )
    return ApiClient(configuration)
