"""Writes `docs/reference/conditions.md`: `python -m pdpool_operator.api.condition_docs [--check] FILE`.

One line for each condition and each reason. A test fails while a line is missing.
"""

from collections.abc import Mapping
from pathlib import Path

import click

from .generated import keep
from .reasons import ConditionType, Reason

CONDITIONS: Mapping[ConditionType, str] = {
    ConditionType.AVAILABLE: (
        "Requests can be served. Pool: at least one instance serves. Service: both sides serve, and a router if it "
        "has one."
    ),
    ConditionType.READY: (
        "Everything is as the spec says: number of instances, their spec, and each of them serves. PoolOperation: it "
        "has succeeded."
    ),
    ConditionType.RECONCILING: "The operator or Kubernetes still works or waits. Present only while it is True.",
    ConditionType.STALLED: "Nothing proceeds until a person changes something. Present only while it is True.",
    ConditionType.QUEUES_HEALTHY: "The hand-off queues are empty or move. False: requests wait and nothing moves.",
    ConditionType.ROUTER_READY: "Service only. All wanted routers serve, or the service runs no router.",
    ConditionType.HOLDS_PROVABLE: (
        "Pool only. False: an engine holds memory for a lost peer, and nothing proves that the peer has ended."
    ),
    ConditionType.TRANSFER_READY: (
        "Pool with `rdma.mode` Required or Preferred only. False: KV cache travels by another transport than RDMA."
    ),
    ConditionType.REPAIR_STOPPED: (
        "Pool with `repair.mode` Enforce only. An instance is at fault, and repair cannot mend it: a person must act. "
        "Present only while it is True."
    ),
    ConditionType.PEERS_UNREACHABLE: (
        "Pool only. A decode instance gets no answer from a prefill instance, while both answer the operator. Present "
        "only while it is True."
    ),
}

REASONS: Mapping[str, Mapping[Reason, str]] = {
    "Refused": {
        Reason.SPEC_INVALID: "A field of the spec is missing or out of bounds.",
        Reason.TEMPLATE_INVALID: "The pod template cannot be merged, or the API server refuses the result.",
        Reason.NAME_CONFLICT: "An object of a needed name has another controller.",
        Reason.NO_CONTROLLER: "An object of a needed name has no controller and lacks the labels of pdpool.",
        Reason.APPLY_FAILED: "The API server refuses an object: admission, quota, missing rights of the operator.",
        Reason.POOLS_CONTRADICT: "The specs of the two pools do not fit each other, so requests fail.",
    },
    "Kubernetes cannot run it": {
        Reason.MISSING_REFERENCE: "The template names a ConfigMap, claim or service account that does not exist.",
        Reason.MISSING_SECRET: "A pod needs a Secret that does not exist.",
        Reason.POD_REJECTED: "Kubernetes refuses to create a pod: admission, quota, pod security.",
        Reason.IMAGE_PULL_FAILED: "A node cannot pull an image.",
        Reason.CONTAINER_CONFIG_INVALID: "The container runtime cannot make a container as the template says.",
        Reason.UNSCHEDULABLE: "No node takes a pod.",
        Reason.CRASH_LOOP: "A container ends again and again.",
        Reason.POD_LINGERS: "A pod should have terminated, but its node does not report it.",
        Reason.NODE_NOT_READY: "The kubelet of a node does not report, so Kubernetes counts its pods as not Ready.",
        Reason.API_FAILING: "The API server failed the operator's calls repeatedly. The operator tries again.",
    },
    "In progress": {
        Reason.POOL_NOT_FOUND: "The pool does not exist. A service waits for it; an operation has failed.",
        Reason.NO_PODS: "No instance is created yet.",
        Reason.STARTING: "Instances start.",
        Reason.ENGINES_NOT_READY: "An instance that served before cannot serve now.",
        Reason.ROUTER_NOT_READY: "Fewer routers serve than the spec demands.",
        Reason.ROUTER_LIST_OUTDATED: "The worker list of a router is unknown or does not match the engines.",
        Reason.POOLS_NOT_READY: "No instance of a pool of the service can serve.",
        Reason.SCALING_UP: "Instances are created.",
        Reason.SCALING_DOWN: "Surplus instances are removed.",
        Reason.UPDATING: "Instances or routers of an earlier spec are replaced.",
        Reason.DRAINING: (
            "An instance finishes its requests before it is replaced or removed, or an operation keeps it out of the "
            "rotation."
        ),
        Reason.WAITING: "An operation has not begun, or waits for something. The message names it.",
        Reason.RESTARTING: "An operation replaces the pod of an instance.",
        Reason.PURGING: "An operation ends old hand-offs of an instance.",
        Reason.FENCING: "An operation has engines release the memory that they hold for a node that is off.",
        Reason.ADOPTING: "Objects of pdpool that had lost their owner get it back.",
        Reason.DELETING: "The object is being deleted.",
    },
    "Good": {
        Reason.SERVING: "Requests can be served.",
        Reason.READY: "All is well.",
        Reason.UPDATE_AVAILABLE: "All is well. An earlier operator version built the pods; a restart replaces them.",
        Reason.SCALED_TO_ZERO: "The spec wants no instance, so Ready is True and Available is False.",
        Reason.ROUTER_DISABLED: "The spec wants no router.",
        Reason.SUCCEEDED: "The operation has done what its spec says.",
    },
    "An operation has failed": {
        Reason.INSTANCE_NOT_FOUND: "The pool has no such instance, or lost it before the operation ended.",
        Reason.INSTANCE_TAKEN: "Another operation acts on the instance, or keeps it out of the rotation.",
        Reason.NO_ROUTER: "No router of pdpool's sends requests to the instance, so it cannot be drained.",
        Reason.PURGE_REFUSED: "The engine does not run pdpool's connector, or the connector has refused the purge.",
        Reason.FENCE_REFUSED: "A connector refused the proof that a process has ended. Also an event of a pool.",
        Reason.NODE_IN_SERVICE: "The cluster does not agree that the node is off.",
        Reason.NODE_UNREADABLE: "The operator may not read Nodes.",
        Reason.PEERS_UNKNOWN: "Memory is held for pods of which the operator does not know the node.",
        Reason.DEADLINE_PASSED: "The operation did not end within `deadlineSeconds`.",
    },
    "Hand-off queues": {
        Reason.NO_INSTANCES: "There is no instance to judge.",
        Reason.NOT_JUDGED: "The operator has started and has not sampled the engines yet.",
        Reason.QUEUES_FLOWING: "The queues are empty or move.",
        Reason.QUEUES_SATURATED: "Requests wait long, but the queues move.",
        Reason.REQUESTS_LEAKED: "An engine keeps requests in a queue although their hand-offs have ended. It serves.",
        Reason.QUEUES_BLOCKED: "An instance waits for the other side.",
        Reason.QUEUES_STUCK: "Nothing moves at an instance, and it is itself at fault.",
        Reason.REQUESTS_FAILING: "An instance fails requests that its siblings serve, and leaves the rotation.",
        Reason.NOTHING_FINISHES: "Requests fail at an instance and none finishes, and no sibling serves.",
        Reason.QUEUES_UNKNOWN: "An instance cannot be judged.",
    },
    "Repair": {
        Reason.RESTART_DID_NOT_HELP: "An instance was restarted within the hour, and is at fault again elsewhere.",
        Reason.REPLACEMENT_DID_NOT_HELP: (
            "An instance was restarted and then replaced within the hour, and is at fault again."
        ),
        Reason.MANY_AT_FAULT: "More than a third of the instances are at fault, so the cause may lie elsewhere.",
        Reason.REPAIR_BUDGET_SPENT: "`restartsPerHour` restarts and replacements were made within the hour.",
    },
    "Held memory": {
        Reason.NOTHING_UNPROVEN: "All held memory can be released.",
        Reason.PEER_UNPROVEN: "An engine holds memory for a peer of which nothing proves that it has ended.",
    },
    "Network between engines": {
        Reason.PEER_SILENT: "A decode instance gets no answer from a prefill instance, while both answer the operator.",
    },
    "Transport": {
        Reason.RDMA_IN_USE: "All paired engines transfer by RDMA.",
        Reason.NOT_RDMA: "An engine reaches a peer by another transport. Under `Required` it is not available.",
        Reason.NOT_PAIRED: "No engine has paired with a peer yet, so the transport is not known.",
        Reason.TRANSPORT_UNKNOWN: "The transfer backend does not report its transport.",
    },
    "Events only": {
        Reason.FENCED_PEER: "The operator proved to an engine that a peer has ended.",
        Reason.INSTANCE_CREATED: "The operator created instances.",
        Reason.INSTANCE_REPLACED: "The operator deleted a pod, so that it starts anew.",
        Reason.INSTANCE_DELETED: "The operator removed an instance.",
        Reason.DRAIN_STARTED: "An instance leaves rotation and finishes its requests.",
        Reason.DRAIN_TIMED_OUT: "An instance had not finished within drainTimeoutSeconds.",
        Reason.DRAIN_CANCELLED: "An instance that drained is needed again.",
        Reason.REPAIR_PROPOSED: "An instance is at fault. The message says what repair would do, and why it does not.",
        Reason.REPAIR_DONE: "The operator ended hand-offs of an instance at fault, or deleted its pod to restart it.",
        Reason.REPAIR_WITHDRAWN: "An intended repair was not made: the instance recovered, or it may not be repaired.",
        Reason.ROUTER_ADDED: "A router that was unreachable is reachable. Its Service lists it again.",
        Reason.ROUTER_REMOVED: "A router is unreachable and another is not. Its Service lists it no longer.",
        Reason.WORKER_ADDED: "An engine is added to the routers' lists.",
        Reason.WORKER_REMOVED: "An engine is removed from the routers' lists.",
        Reason.OBJECT_RESTORED: "An object was edited or deleted, and the operator restored it.",
        Reason.OBJECT_ADOPTED: "The operator took over objects that had lost their owner.",
    },
}
"""Lines of the documentation, by heading."""

NEEDS_PERSON = frozenset(
    {
        *REASONS["Refused"],
        *REASONS["Kubernetes cannot run it"],
        Reason.POOL_NOT_FOUND,
        Reason.ENGINES_NOT_READY,
    }
)
"""Reasons of `Ready` False for which a person should look: `kubectl pdpool` counts them, and alerts name most of them.

`PoolsNotReady` and `RouterNotReady` are left out, because `Available` or `RouterReady` is False then.
"""


INTRODUCTION = """\
# Conditions and reasons

Generated from `pdpool_operator.api.condition_docs` by `make generate`; do not edit.

`kubectl get pd` shows the reason of `Ready` in the column REASON. `kubectl describe` shows the
messages. Live numbers are metrics and stand in no message. [Troubleshooting](../troubleshooting.md)
says what to do about each reason on which a person must act.

```sh
kubectl wait pdsvc/chat -n llm --for=condition=Available --timeout=5m   # requests can be served
kubectl wait pdsvc/chat -n llm --for=condition=Ready --timeout=30m      # all is as the spec says
```

Both commands are right directly after a change of the spec: they ignore conditions of an earlier
generation. An annotation does not change the generation. To wait for a restart, wait for the value
of the annotation in the status:

```sh
at="$(date +%FT%T)"
kubectl annotate dpool/chat -n llm pdpool.dev/restarted-at="$at" --overwrite
kubectl wait dpool/chat -n llm --for=jsonpath='{.status.restartedAt}'="$at" --timeout=30m
```

## Flux, Helm, Argo CD

`Ready`, `Reconciling`, `Stalled` and `observedGeneration` follow
[kstatus](https://github.com/kubernetes-sigs/cli-utils/blob/master/pkg/kstatus/README.md), which
Flux and `helm --wait` read. The first line that applies counts:

| status | kstatus |
|---|---|
| the object is being deleted | `Terminating` |
| `observedGeneration` is not the generation | `InProgress` |
| `Reconciling` is True | `InProgress` |
| `Stalled` is True | `Failed` |
| `Ready` is not True | `InProgress` |
| `Ready` is True | `Current` |

A pool with `replicas: 0` is Ready and not Available. So is a service that binds it, because this is
what the specs say. Alert on `Available`, not on `Ready`.

Argo CD needs a health check for each kind of the group `pdpool.dev`:

```lua
local health = {status = "Progressing", message = "Waiting for the operator"}
if obj.status == nil or obj.status.observedGeneration ~= obj.metadata.generation then
  return health
end
for _, condition in ipairs(obj.status.conditions or {}) do
  if condition.type == "Stalled" and condition.status == "True" then
    return {status = "Degraded", message = condition.message}
  end
  if condition.type == "Ready" then
    health.message = condition.message
    if condition.status == "True" then
      health.status = "Healthy"
    end
  end
end
return health
```
"""


def page() -> str:
    """Return the page as Markdown."""
    lines = [INTRODUCTION, "## Conditions", "", "| condition | meaning |", "|---|---|"]
    lines += [f"| `{kind}` | {text} |" for kind, text in CONDITIONS.items()]
    lines += ["", "## Reasons"]
    for heading, reasons in REASONS.items():
        lines += ["", f"### {heading}", "", "| reason | meaning |", "|---|---|"]
        lines += [f"| `{reason}` | {text} |" for reason, text in reasons.items()]
    return "\n".join(lines) + "\n"


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Write nothing; fail if the file differs from what would be written.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def main(check: bool, file: Path) -> None:
    """Write or check the page."""
    keep(file, page(), module="pdpool_operator.api.condition_docs", check=check)


if __name__ == "__main__":
    main()
