"""An API server of a test's own, on loopback: objects in memory, lists, watches, apply, the Lease, and faults.

It answers what the operator asks: discovery, OpenAPI, paged lists, watches with bookmarks from any version,
server-side apply, status, merge patches and deletions. No controller runs in it.
"""

import asyncio
import contextlib
import copy
import itertools
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from pdpool_operator.api import served
from pdpool_operator.app import OWNED, PRIMARY
from pdpool_operator.runtime.resources import EVENTS, LEASES, NODES, SECRETS, Resource

Object = dict[str, Any]
NAMESPACES = Resource("", "v1", "namespaces", "Namespace")
CRDS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition")
REVIEWS = Resource("authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview")
RESOURCES = {
    (one.group, one.version, one.plural): one
    for one in (*PRIMARY, *OWNED, LEASES, EVENTS, SECRETS, NAMESPACES, CRDS, NODES, REVIEWS)
}


@dataclass(frozen=True)
class Call:
    """One request. `verb` is get, list, watch, create, update, patch or delete."""

    at: float
    verb: str
    plural: str
    path: str


Fault = Callable[[web.Request, Call], Awaitable[web.StreamResponse | None]]


def _merged(old: Any, new: Any) -> Any:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    merged = old | {key: _merged(old.get(key), value) for key, value in new.items()}
    return {key: value for key, value in merged.items() if value is not None}


@dataclass
class FakeApi:
    """The server. `fault` may answer a request in its place."""

    bookmark_s: float = 1.0
    fault: Fault | None = None
    denied: set[tuple[str, str]] = field(default_factory=set)
    """Verb and resource that access reviews deny."""
    on_put: Callable[["FakeApi", Resource, Object], None] = lambda *_: None
    """Called after each stored object. Takes the place of controllers and kubelets."""
    objects: dict[Resource, dict[tuple[str, str], Object]] = field(default_factory=dict)
    history: list[tuple[int, Resource, str, Object]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    watches: list[web.Request] = field(default_factory=list)
    version: int = 0
    url: str = ""
    _uids: Any = field(default_factory=lambda: itertools.count(1))
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        parts = request.path.strip("/").split("/")
        if request.path.startswith("/openapi"):
            resource, rest = None, parts
        else:
            resource, rest = self._resource(parts)
        verb = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}.get(request.method, "get")
        if verb == "get" and resource is not None and not rest[1:]:
            verb = "watch" if "watch" in request.query else "list"
        call = Call(time.monotonic(), verb, resource.plural if resource else request.path, request.path)
        self.calls.append(call)
        if self.fault is not None and (answer := await self.fault(request, call)) is not None:
            return answer
        if resource is None:
            return self._discovery(request.path)
        namespace, name, subresource = rest[0], *[*rest[1:], None, None][:2]
        if not resource.kind:
            return self._refused(404, "NotFound")
        if verb == "watch":
            self.watches.append(request)
            try:
                return await self._watch(request, resource, namespace)
            finally:
                self.watches.remove(request)
        if verb == "list":
            return self._list(request, resource, namespace)
        body = json.loads(text) if (text := await request.text()) else {}
        if resource == REVIEWS:
            return self._review(body)
        return self._one(request, verb, resource, namespace, name or body["metadata"]["name"], subresource, body)

    def _review(self, body: Object) -> web.Response:
        asked = body["spec"]["resourceAttributes"]
        part = f"/{asked['subresource']}" if asked.get("subresource") else ""
        allowed = (asked["verb"], asked["resource"] + part) not in self.denied
        return web.json_response(body | {"status": {"allowed": allowed}}, status=201)

    def put(self, resource: Resource, namespace: str, name: str, body: Object) -> Object:
        """Store an object: a new one, or a new state."""
        self.version += 1
        known = self.objects.setdefault(resource, {}).get((namespace, name))
        old = known["metadata"] if known else {"uid": f"uid-{next(self._uids)}", "generation": 0}
        meta = body.get("metadata", {}) | {
            "name": name,
            "namespace": namespace,
            "uid": old["uid"],
            "creationTimestamp": old.get("creationTimestamp", "2026-01-01T00:00:00Z"),
            "generation": old["generation"] + (not known or known.get("spec") != body.get("spec")),
            "resourceVersion": str(self.version),
        }
        obj = body | {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": meta}
        self.objects[resource][namespace, name] = obj
        self._record(resource, "MODIFIED" if known else "ADDED", obj)
        self.on_put(self, resource, obj)
        return obj

    def remove(self, resource: Resource, namespace: str, name: str, *, unseen: bool = False) -> None:
        """Delete an object. If `unseen`, no watch shows it."""
        self.version += 1
        obj = self.objects[resource].pop((namespace, name))
        obj = obj | {"metadata": obj["metadata"] | {"resourceVersion": str(self.version)}}
        if not unseen:
            self._record(resource, "DELETED", obj)

    def cut_watches(self) -> None:
        """Reset the connections of all watches."""
        for request in self.watches:
            if request.transport is not None:
                request.transport.abort()

    def per_resource(self, since: float) -> Counter[str]:
        """Count the calls by resource since a monotonic time, those of the Lease left out."""
        return Counter(call.plural for call in self.calls if call.at >= since and call.plural != LEASES.plural)

    def _record(self, resource: Resource, type_: str, obj: Object) -> None:
        self.history.append((self.version, resource, type_, copy.deepcopy(obj)))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _resource(self, parts: list[str]) -> tuple[Resource | None, list[Any]]:
        group, rest = ("", parts[1:]) if parts[0] == "api" else (parts[1] if len(parts) > 1 else "", parts[2:])
        if len(rest) < 2:
            return None, parts
        version, namespace, rest = (
            (rest[0], rest[2], rest[3:]) if rest[1] == "namespaces" else (rest[0], None, rest[1:])
        )
        resource = RESOURCES.get((group, version, rest[0]), Resource(group, version, rest[0], ""))
        return resource, [namespace, *rest[1:]]

    def _discovery(self, path: str) -> web.Response:
        if path.startswith("/openapi/v3"):
            schemas = {
                kind: schema | {"x-kubernetes-group-version-kind": [{"group": "pdpool.dev", "kind": kind}]}
                for kind, schema in served.wanted().items()
            }
            return web.json_response({"components": {"schemas": schemas}})
        if path == "/api":
            return web.json_response({"versions": ["v1"]})
        if path == "/apis":
            groups = sorted({(one.group, one.version) for one in RESOURCES.values() if one.group})
            return web.json_response(
                {
                    "groups": [
                        {"name": g, "versions": [{"version": v}], "preferredVersion": {"version": v}} for g, v in groups
                    ]
                }
            )
        kinds = [one for one in RESOURCES.values() if one.path(None).rpartition("/")[0] == path]
        verbs = ["get", "list", "watch", "create", "patch", "delete"]
        return web.json_response(
            {
                "resources": [
                    {"name": one.plural, "kind": one.kind, "singularName": "", "namespaced": True, "verbs": verbs}
                    for one in kinds
                ]
            }
        )

    def _matching(self, request: web.Request, namespace: str | None, obj: Object) -> bool:
        wanted = dict(part.split("=") for part in request.query.get("labelSelector", "").split(",") if part)
        fields = dict(part.split("=") for part in request.query.get("fieldSelector", "").split(",") if part)
        labels = obj["metadata"].get("labels") or {}
        return (
            namespace in (None, obj["metadata"]["namespace"])
            and all(labels.get(key) == value for key, value in wanted.items())
            and not fields
        )

    def _list(self, request: web.Request, resource: Resource, namespace: str | None) -> web.Response:
        start, limit = int(request.query.get("continue") or 0), int(request.query.get("limit") or 10**6)
        found = [obj for obj in self.objects.get(resource, {}).values() if self._matching(request, namespace, obj)]
        rest = str(start + limit) if start + limit < len(found) else ""
        meta = {"resourceVersion": str(self.version), "continue": rest}
        return web.json_response({"metadata": meta, "items": found[start : start + limit]})

    async def _watch(self, request: web.Request, resource: Resource, namespace: str | None) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        since, sent = int(request.query["resourceVersion"]), 0
        ends = time.monotonic() + float(request.query.get("timeoutSeconds", 300))
        marked = time.monotonic()
        while time.monotonic() < ends:
            changed = self._changed
            for version, kind, type_, obj in self.history[sent:]:
                if version > since and kind == resource and self._matching(request, namespace, obj):
                    await answer.write(json.dumps({"type": type_, "object": obj}).encode() + b"\n")
            sent = len(self.history)
            if time.monotonic() >= marked + self.bookmark_s:
                marked = time.monotonic()
                mark = {"kind": resource.kind, "metadata": {"resourceVersion": str(self.version)}}
                await answer.write(json.dumps({"type": "BOOKMARK", "object": mark}).encode() + b"\n")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(marked + self.bookmark_s, ends) - time.monotonic())):
                    await changed.wait()
        return answer

    def _one(
        self,
        request: web.Request,
        verb: str,
        resource: Resource,
        namespace: str,
        name: str,
        subresource: str | None,
        body: Object,
    ) -> web.Response:
        known = self.objects.get(resource, {}).get((namespace, name))
        if verb == "create" and known:
            return self._refused(409, "AlreadyExists")
        if known is None and (verb in ("get", "update", "delete") or subresource):
            return self._refused(404, "NotFound")
        if verb == "get":
            return web.json_response(known)
        sent = body.get("metadata", {})
        for key in ("resourceVersion", "uid") if known and verb != "delete" else ():
            if key in sent and sent[key] != known["metadata"][key]:
                return self._refused(409, "Conflict")
        if verb == "delete":
            self.remove(resource, namespace, name)
            return web.json_response({"kind": "Status", "status": "Success"})
        if verb == "patch" and known:
            body = _merged(known, body)
        if "dryRun" in request.query:
            return web.json_response(body)
        if known and {**body, "metadata": None} == {**known, "metadata": None} and verb == "patch":
            kept = {key: value for key, value in body["metadata"].items() if known["metadata"].get(key) != value}
            if not kept:
                return web.json_response(known)
        return web.json_response(self.put(resource, namespace, name, body), status=200 if known else 201)

    def _refused(self, status: int, reason: str) -> web.Response:
        return web.json_response({"kind": "Status", "code": status, "reason": reason, "message": reason}, status=status)
