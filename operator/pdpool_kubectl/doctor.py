"""`doctor`: checks each precondition by doing it, and names the command that repairs it.

A check is `unknown` if the caller may not see what it needs.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pdpool_operator.api import names, served
from pdpool_operator.api.pools import POOL_KINDS
from pdpool_operator.build.canonical import quantity
from pdpool_operator.observe import parse
from pdpool_operator.runtime.api import Api
from pdpool_operator.runtime.api_errors import ApiError, ForbiddenError, NotFoundError
from pdpool_operator.runtime.resources import CONFIG_MAPS, LEASES, NODES, PODS, POOL_RESOURCES, Object, Resource
from pdpool_operator.status.pods import IMAGE_REASONS

from .access import Access
from .queues import OPERATOR_PODS, read_queues
from .text import seconds, table

OK, FAILED, UNKNOWN = "ok", "failed", "unknown"
PROMETHEUS_RULES = Resource("monitoring.coreos.com", "v1", "prometheusrules", "PrometheusRule")
ACCESS_REVIEWS = Resource("authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview")
CHART = "charts/pdpool"


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check."""

    name: str
    outcome: str
    """`ok`, `failed` or `unknown`."""
    detail: str
    mend: str = ""
    """Command that repairs it, or that shows the cause. Empty if nothing is to be done."""


@dataclass(frozen=True, slots=True)
class Doctor:
    """The checks of one cluster."""

    api: Api
    access: Access
    scope: str | None
    """Namespace whose pods and pools are checked. `None` means all."""
    operator_namespace: str
    now: datetime

    async def run(self) -> tuple[Check, ...]:
        """Run all checks. One that the API server refuses is unknown.

        Raises:
            ApiError: the API server does not answer.
        """
        checks: list[tuple[str, Callable[[], Awaitable[list[Check]]]]] = [
            ("kinds", self._kinds),
            ("rights", self._rights),
            ("operator", self._operator),
            ("lease", self._lease),
            ("metrics", self._metrics),
            ("rules", self._rules),
            ("images", self._images),
            ("rdma", self._rdma),
        ]
        found: list[Check] = []
        for name, check in checks:
            try:
                found += await check()
            except ForbiddenError as error:
                found.append(Check(name, UNKNOWN, f"you may not see it: {error}"))
            except ApiError as error:
                if not found and (error.status == 0 or error.status >= 500):
                    raise
                found.append(Check(name, UNKNOWN, str(error)))
        return tuple(found)

    async def _kinds(self) -> list[Check]:
        mend = (
            f"helm upgrade --install pdpool {CHART} --namespace {self.operator_namespace} "
            "--reset-then-reuse-values --wait"
        )
        try:
            kinds = served.served(await self.api.openapi(names.GROUP, names.VERSION))
        except NotFoundError:
            return [Check("kinds", FAILED, f"the API server does not serve {names.API_VERSION}", mend)]
        wanted = served.wanted()
        lacking = [
            f"{kind}.{path}"
            for kind, schema in wanted.items()
            for path in (served.missing_fields(schema, kinds[kind]) if kind in kinds else ("",))
        ]
        if lacking:
            detail = f"the installed CRDs lack {', '.join(one.rstrip('.') for one in lacking[:5])}"
            return [Check("kinds", FAILED, detail, mend)]
        return [Check("kinds", OK, f"{', '.join(sorted(wanted))} have all fields of this version")]

    async def _rights(self) -> list[Check]:
        where = self.scope or ""
        needed = [(names.GROUP, kind.plural, "list", where) for kind in POOL_KINDS]
        needed += [("", "pods", "list", where), ("", "pods/proxy", "get", self.operator_namespace)]
        refused = [right for right in needed if not await self._allowed(*right)]
        if not refused:
            return [Check("rights", OK, "you may list pools and pods, and read the operator's metrics")]
        return [
            Check(
                "rights",
                FAILED,
                f"you may not {verb} {resource}{f' in {namespace}' if namespace else ' in all namespaces'}",
                self._grant(resource, group, verb, namespace),
            )
            for group, resource, verb, namespace in refused
        ]

    async def _allowed(self, group: str, resource: str, verb: str, namespace: str) -> bool:
        plural, _, subresource = resource.partition("/")
        attributes = {
            "group": group,
            "resource": plural,
            "subresource": subresource,
            "verb": verb,
            "namespace": namespace,
        }
        body = {
            "apiVersion": ACCESS_REVIEWS.api_version,
            "kind": ACCESS_REVIEWS.kind,
            "metadata": {},
            "spec": {"resourceAttributes": attributes},
        }
        answer = await self.api.create(ACCESS_REVIEWS, body)
        return bool((answer.get("status") or {}).get("allowed"))

    def _grant(self, resource: str, group: str, verb: str, namespace: str) -> str:
        role = f"pdpool-{resource.replace('/', '-')}-reader"
        kind, flags = ("role", self.access.flags(namespace)) if namespace else ("clusterrole", "")
        qualified = f"{resource.partition('/')[0]}.{group}" if group else resource
        create = f"kubectl create {kind} {role} --verb={verb} --resource={qualified} {flags}".rstrip()
        bind = f"kubectl create {kind}binding {role} --{kind}={role} --user=YOU {flags}".rstrip()
        return f"{create} && {bind}"

    async def _operator(self) -> list[Check]:
        pods = await self._list(PODS, self.operator_namespace, OPERATOR_PODS)
        if not pods:
            detail = f"no pod of the operator runs in {self.operator_namespace}; --operator-namespace names another"
            mend = f"helm install pdpool {CHART} --namespace {self.operator_namespace} --create-namespace --wait"
            return [Check("operator", FAILED, detail, mend)]
        observed = [parse.observed_pod(pod) for pod in pods]
        images = sorted({c["image"] for pod in pods for c in _containers(pod)})
        if any(pod.ready for pod in observed):
            return [Check("operator", OK, f"{len(observed)} pods, image {', '.join(images)}")]
        pod = observed[0]
        why = " ".join(filter(None, (pod.waiting_reason, pod.waiting_message, pod.last_end, pod.unschedulable)))
        mend = f"kubectl describe pod {pod.name} {self.access.flags(self.operator_namespace)}"
        return [Check("operator", FAILED, f"{pod.name} is not Ready: {why or pod.phase}", mend)]

    async def _lease(self) -> list[Check]:
        flags = self.access.flags(self.operator_namespace)
        for pod in await self._list(PODS, self.operator_namespace, OPERATOR_PODS):
            environment = {
                one["name"]: one.get("value", "")
                for container in _containers(pod)
                for one in container.get("env") or ()
            }
            name = environment.get("PDPOOL_LEASE", "")
            lease = await self.api.get(LEASES, self.operator_namespace, name) if name else None
            spec = (lease or {}).get("spec") or {}
            renewed = parse.moment(spec.get("renewTime") or "")
            if renewed is None or not spec.get("holderIdentity"):
                return [
                    Check("lease", FAILED, f"no operator holds the Lease {name}", f"kubectl logs {flags} {_name(pod)}")
                ]
            passed = self.now - renewed
            detail = f"{spec['holderIdentity']} renewed {name} {seconds(passed.total_seconds())} ago"
            if passed > timedelta(seconds=int(spec.get("leaseDurationSeconds") or 0)):
                return [Check("lease", FAILED, f"{detail}: nobody leads", f"kubectl logs {flags} {_name(pod)}")]
            return [Check("lease", OK, detail)]
        return [Check("lease", UNKNOWN, "no operator runs")]

    async def _metrics(self) -> list[Check]:
        reading = await read_queues(self.api, self.operator_namespace)
        if reading.error:
            mend = (
                f"kubectl port-forward {self.access.flags(self.operator_namespace)} "
                "deployment/pdpool-operator 8080:8080  # then http://127.0.0.1:8080/metrics"
            )
            return [Check("metrics", FAILED, reading.error, mend)]
        return [Check("metrics", OK, f"the operator reports {len(reading.queues)} queues")]

    async def _rules(self) -> list[Check]:
        mend = (
            f"helm upgrade pdpool {CHART} --namespace {self.operator_namespace} --reset-then-reuse-values "
            "--set rules.configMap.enabled=true  # with the Prometheus operator: rules.prometheusRule.enabled=true"
        )
        try:
            custom = await self._list(PROMETHEUS_RULES, None, "app.kubernetes.io/name=pdpool")
        except NotFoundError:
            custom = []  # the cluster has no Prometheus operator
        if custom:
            return [Check("rules", OK, f"PrometheusRule {_name(custom[0])}")]
        maps = await self._list(CONFIG_MAPS, self.operator_namespace, "app.kubernetes.io/name=pdpool")
        found = [_name(one) for one in maps if "pdpool.rules.yaml" in (one.get("data") or {})]
        if found:
            return [Check("rules", OK, f"ConfigMap {found[0]}; whether a Prometheus loads it is not visible here")]
        return [Check("rules", FAILED, "no alert rules are installed", mend)]

    async def _images(self) -> list[Check]:
        pods = await self._list(PODS, self.scope, names.SELECT_MADE)
        observed = [(pod["metadata"]["namespace"], parse.observed_pod(pod)) for pod in pods]
        failing = [(namespace, pod) for namespace, pod in observed if pod.waiting_reason in IMAGE_REASONS]
        if not failing:
            return [Check("images", OK, f"no pod of {len(pods)} waits for an image")]
        return [
            Check(
                "images",
                FAILED,
                f"{pod.name}: {pod.waiting_reason} {pod.waiting_message}".rstrip(),
                f"kubectl describe pod {pod.name} {self.access.flags(namespace)}",
            )
            for namespace, pod in failing
        ]

    async def _rdma(self) -> list[Check]:
        wanted: dict[str, int] = {}
        async for spec in self._pool_specs():
            rdma = spec.get("rdma") or {}
            if rdma.get("mode") != "Off" and rdma.get("resource"):
                wanted[rdma["resource"]] = max(wanted.get(rdma["resource"], 0), int(rdma.get("count") or 1))
        if not wanted:
            return [Check("rdma", OK, "no pool asks for RDMA devices")]
        nodes = await self._list(NODES, None, "")
        checks = []
        for resource, count in sorted(wanted.items()):
            fit = [_name(node) for node in nodes if _devices(node, resource) >= count]
            if fit:
                checks.append(Check("rdma", OK, f"{len(fit)} nodes have {count} of {resource}"))
                continue
            column = resource.replace(".", r"\.")
            mend = f"kubectl get nodes -o custom-columns='NAME:.metadata.name,DEVICES:.status.allocatable.{column}'"
            detail = f"no node of {len(nodes)} has {count} of {resource}: its device plugin is missing (docs/rdma.md)"
            checks.append(Check("rdma", FAILED, detail, mend))
        return checks

    async def _pool_specs(self) -> AsyncIterator[Object]:
        for kind in POOL_KINDS:
            async for body in self.api.list(POOL_RESOURCES[kind], self.scope):
                yield body.get("spec") or {}

    async def _list(self, resource: Resource, namespace: str | None, labels: str) -> list[Object]:
        return [obj async for obj in self.api.list(resource, namespace, labels)]


def _containers(pod: Object) -> list[Object]:
    return list((pod.get("spec") or {}).get("containers") or ())


def _name(obj: Object) -> str:
    return str(obj["metadata"]["name"])


async def examine(api: Api, access: Access, operator_namespace: str) -> tuple[Check, ...]:
    """Run all checks.

    Raises:
        AccessError: the kubeconfig cannot be read, or lacks the context.
        ApiError: the API server does not answer.
    """
    return await Doctor(api, access, access.scope(), operator_namespace, datetime.now(UTC)).run()


def doctor_lines(checks: tuple[Check, ...]) -> list[str]:
    """Return the text of `doctor`."""
    lines = table(("CHECK", "RESULT", "DETAIL"), [(check.name, check.outcome, check.detail) for check in checks])
    mends = [f"  {check.mend}" for check in checks if check.mend]
    return lines + (["mend:", *mends] if mends else [])


def doctor_json(checks: tuple[Check, ...]) -> dict[str, Any]:
    """Return what `-o json` prints."""
    return {"checks": [asdict(check) for check in checks]}


def _devices(node: Object, resource: str) -> int:
    """Return how many devices pods may have on a node. What is no whole number counts as none."""
    plain = str(quantity(((node.get("status") or {}).get("allocatable") or {}).get(resource)))
    return int(plain) if plain.isdecimal() else 0
