"""The calls of the Kubernetes API that the operator makes: plain dicts in and out, typed errors.

No call is repeated, because callers are level-triggered and try again by themselves.
"""

import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import quote

from kubernetes.aio.client import ApiClient

from ..api.names import FIELD_MANAGER, STATUS_FIELD_MANAGER
from .api_answers import error_of, event_of, object_of
from .api_errors import ConflictError, NameConflictError, NotFoundError, UnavailableError
from .api_transport import ApiTransport, Request
from .resources import OPENAPI, Object, Resource, controller_of
from .write_budget import within_budget

REQUEST_TIMEOUT_S = 10.0
PAGE_LIMIT = 500
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
HISTORY_S = 5
"""Seconds for which the API server keeps a history request open. Remembered events arrive at once."""
BY_OPERATOR = {"fieldManager": FIELD_MANAGER}
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"

Objects = list[Object]

log = logging.getLogger(__name__)


class Api:
    """The API calls that the operator makes.

    Args:
        client: Sends the requests.
        timeout_s: Deadline of each call, in seconds.
        write_budget: Returns the seconds that a write may take. With 0, the call raises NotLeaderError.
        on_call: Called for every call with verb, plural and HTTP status, 0 if there was none.
        on_stored: Called with each object that a write has stored.
        on_deleted: Called with resource, namespace, name and UID of each object that a call has deleted.
        user_agent: Name of this program in the API server's audit log.
    """

    def __init__(
        self,
        client: ApiClient,
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
        write_budget: Callable[[], float] = lambda: math.inf,
        on_call: Callable[[str, str, int], None] = lambda *_: None,
        on_stored: Callable[[Resource, Object], None] = lambda *_: None,
        on_deleted: Callable[[Resource, str, str, str], None] = lambda *_: None,
        user_agent: str = "pdpool-operator",
    ) -> None:
        self._transport = ApiTransport(client, timeout_s, on_call, user_agent)
        self._write_budget = write_budget
        self._on_stored, self._on_deleted = on_stored, on_deleted

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

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
        async for page in self._pages(resource, namespace, labels, fields, accept):
            for item in page["items"]:
                yield item

    async def whole_list(self, resource: Resource, namespace: str | None, labels: str) -> tuple[Objects, str]:
        """Return all objects of one state of the cluster, and its resourceVersion.

        Raises:
            GoneError: the API server forgot that state before the last page was read.
        """
        found: Objects = []
        version = ""
        async for page in self._pages(resource, namespace, labels):
            found += page["items"]
            version = str(page["metadata"]["resourceVersion"])
        return found, version

    async def _pages(
        self, resource: Resource, namespace: str | None, labels: str, fields: str = "", accept: str = "application/json"
    ) -> AsyncIterator[Object]:
        """Yield the pages of a list."""
        selectors = {"labelSelector": labels, "fieldSelector": fields}
        query = {"limit": str(PAGE_LIMIT)} | {key: value for key, value in selectors.items() if value}
        kind = {"apiVersion": resource.api_version, "kind": resource.kind}
        while True:
            request = Request("list", resource, resource.path(namespace), query, accept=accept)
            page = await self._transport.call(request)
            items = page.get("items") or []  # null if only metadata is requested and no object exists
            if not isinstance(items, list) or "metadata" not in page:
                raise UnavailableError(0, "NoList", "the answer is not a list", request.what)
            yield page | {"items": [item | kind for item in items]}
            if not (token := page["metadata"].get("continue")):
                return
            query = query | {"continue": token}

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
        request = Request("watch", resource, resource.path(namespace), query)
        async with aclosing(self._transport.stream(request, seconds, silent_s, opened)) as lines:
            async for line in lines:
                yield event_of(line, request.what)

    async def read(self, resource: Resource, path: str) -> Object | None:
        """Return the object at a path, or None."""
        try:
            return await self._transport.call(Request("get", resource, path))
        except NotFoundError:
            return None

    async def text(self, resource: Resource, path: str, *, take: Callable[[bytes], bytes] = bytes) -> str:
        """Return the text at a path, such as that of a pod behind the API server's proxy.

        `take` gets each part of the answer, and returns what is kept of it. It may raise, which ends the call.
        """
        answer = await self._transport.send(Request("get", resource, path, accept="*/*"), take=take)
        return answer.decode(errors="replace")

    async def openapi(self, group: str, version: str) -> Object:
        """Return the OpenAPI v3 document of a group and version."""
        path = f"/openapi/v3/apis/{quote(group)}/{quote(version)}"
        return await self._transport.call(Request("get", OPENAPI, path))

    async def history(self, resource: Resource, namespace: str | None, labels: str, since: str) -> tuple[Object, ...]:
        """Return the states that matching objects have had after the resourceVersion `since`, in order.

        The last state of a deleted object is its state at deletion.

        Raises:
            GoneError: the history of the API server does not reach back that far.
        """
        query = {"watch": "1", "resourceVersion": since, "timeoutSeconds": str(HISTORY_S), "labelSelector": labels}
        request = Request("watch", resource, resource.path(namespace), query)
        answer = await self._transport.send(request)
        events = [object_of(line, request.what) for line in answer.splitlines() if line.strip()]
        for event in events:
            if event["type"] == "ERROR":
                status = event["object"]
                raise error_of(int(status.get("code", 0)), json.dumps(status).encode(), request.what)
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
            ours, theirs = controller_of(body), controller_of(live)
            if not ours or theirs.get("uid") != ours["uid"]:
                owner = f"{theirs['kind']} {theirs['name']}" if theirs else "an unknown owner"
                raise NameConflictError(resource.kind, name, owner)
            intent, force = {**body, "metadata": {**metadata, "uid": live["metadata"]["uid"]}}, True
        query = BY_OPERATOR | {"force": "true" if force else "false"} | ({"dryRun": "All"} if dry_run else {})
        return await self._write("patch", resource, resource.path(namespace, name), intent, query)

    async def apply_unread(self, resource: Resource, body: Mapping[str, Any]) -> Object:
        """Apply a child object server-side that this process may write but not read (a Secret).

        A dry run shows the field managers of an existing object.

        Raises:
            NameConflictError: a foreign object exists under this name.
        """
        metadata = body["metadata"]
        path = resource.path(metadata["namespace"], metadata["name"])
        query = BY_OPERATOR | {"force": "true"}
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
            path, body = resource.path(namespace, name), {"metadata": metadata}
            await self._write("patch", resource, path, body, BY_OPERATOR, patch_type=STRATEGIC_MERGE_PATCH)
        except NotFoundError as gone:
            log.debug("not adopted: %s", gone)

    async def create(self, resource: Resource, body: Mapping[str, Any]) -> Object:
        """Create an object that must not exist yet. One without a namespace belongs to the whole cluster."""
        path = resource.path(body["metadata"].get("namespace"))
        return await self._write("create", resource, path, body, BY_OPERATOR)

    async def replace(self, resource: Resource, body: Mapping[str, Any]) -> Object:
        """Replace an object. `metadata.resourceVersion` is the precondition."""
        meta = body["metadata"]
        path = resource.path(meta["namespace"], meta["name"])
        return await self._write("update", resource, path, body, BY_OPERATOR)

    async def merge(self, resource: Resource, namespace: str, name: str, patch: Mapping[str, Any]) -> Object:
        """Merge-patch an object."""
        path = resource.path(namespace, name)
        return await self._write("patch", resource, path, patch, BY_OPERATOR, patch_type=MERGE_PATCH)

    async def try_create(self, resource: Resource, body: Mapping[str, Any]) -> None:
        """Let the API server check an apply that would create an object. Nothing is stored."""
        meta = body["metadata"]
        query = {"fieldManager": self._transport.user_agent, "dryRun": "All", "fieldValidation": "Strict"}
        await self._write("patch", resource, resource.path(meta["namespace"], meta["name"]), body, query)

    async def try_merge(self, resource: Resource, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        """Let the API server check a merge patch. Nothing is stored."""
        query = {"fieldManager": self._transport.user_agent, "dryRun": "All", "fieldValidation": "Strict"}
        path = resource.path(namespace, name)
        await self._write("patch", resource, path, patch, query, patch_type=MERGE_PATCH)

    async def _write(
        self,
        verb: str,
        resource: Resource,
        path: str,
        body: Mapping[str, Any],
        query: Mapping[str, str],
        *,
        patch_type: str = "application/apply-patch+yaml",
    ) -> Object:
        request = Request(verb, resource, path, query, body, patch_type=patch_type)
        stored = await self._transport.call(request, within_budget(self._write_budget, request.what))
        if "dryRun" not in query and stored.get("kind") != "Status":
            self._on_stored(resource, stored)
        return stored
