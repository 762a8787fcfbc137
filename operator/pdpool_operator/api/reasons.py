"""The vocabulary of conditions and reasons. Conditions, events, logs and metrics take their words from here.

`condition_docs` has one line of documentation for each.
"""

from enum import StrEnum


class ConditionType(StrEnum):
    """Type of a condition that the operator writes. Conditions of other types belong to other writers."""

    AVAILABLE = "Available"
    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    QUEUES_HEALTHY = "QueuesHealthy"
    ROUTER_READY = "RouterReady"
    HOLDS_PROVABLE = "HoldsProvable"
    TRANSFER_READY = "TransferReady"
    REPAIR_STOPPED = "RepairStopped"
    PEERS_UNREACHABLE = "PeersUnreachable"


class Reason(StrEnum):
    """Reason of a condition or event. CamelCase, as Kubernetes requires."""

    # Refused: nothing proceeds until a person changes something. These make `Stalled` True.
    SPEC_INVALID = "SpecInvalid"
    TEMPLATE_INVALID = "TemplateInvalid"
    NAME_CONFLICT = "NameConflict"
    NO_CONTROLLER = "NoController"
    APPLY_FAILED = "ApplyFailed"
    POOLS_CONTRADICT = "PoolsContradict"

    # Kubernetes cannot run it.
    MISSING_REFERENCE = "MissingReference"
    MISSING_SECRET = "MissingSecret"  # noqa: S105 -- a reason, not a secret
    POD_REJECTED = "PodRejected"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CONTAINER_CONFIG_INVALID = "ContainerConfigInvalid"
    UNSCHEDULABLE = "Unschedulable"
    CRASH_LOOP = "CrashLoop"
    POD_LINGERS = "PodLingers"
    NODE_NOT_READY = "NodeNotReady"
    API_FAILING = "ApiFailing"

    # In progress.
    POOL_NOT_FOUND = "PoolNotFound"
    NO_PODS = "NoPods"
    STARTING = "Starting"
    ENGINES_NOT_READY = "EnginesNotReady"
    ROUTER_NOT_READY = "RouterNotReady"
    ROUTER_LIST_OUTDATED = "RouterListOutdated"
    POOLS_NOT_READY = "PoolsNotReady"
    SCALING_UP = "ScalingUp"
    SCALING_DOWN = "ScalingDown"
    UPDATING = "Updating"
    DRAINING = "Draining"
    ADOPTING = "Adopting"
    DELETING = "Deleting"

    WAITING = "Waiting"
    RESTARTING = "Restarting"
    PURGING = "Purging"
    FENCING = "Fencing"

    # Good.
    SERVING = "Serving"
    READY = "Ready"
    UPDATE_AVAILABLE = "UpdateAvailable"
    SCALED_TO_ZERO = "ScaledToZero"
    ROUTER_DISABLED = "RouterDisabled"
    SUCCEEDED = "Succeeded"

    # An operation has failed.
    INSTANCE_NOT_FOUND = "InstanceNotFound"
    INSTANCE_TAKEN = "InstanceTaken"
    NO_ROUTER = "NoRouter"
    PURGE_REFUSED = "PurgeRefused"
    FENCE_REFUSED = "FenceRefused"
    NODE_IN_SERVICE = "NodeInService"
    NODE_UNREADABLE = "NodeUnreadable"
    PEERS_UNKNOWN = "PeersUnknown"
    DEADLINE_PASSED = "DeadlinePassed"

    # Hand-off queues: the worst verdict of a pool.
    NO_INSTANCES = "NoInstances"
    NOT_JUDGED = "NotJudged"
    QUEUES_FLOWING = "QueuesFlowing"
    QUEUES_SATURATED = "QueuesSaturated"
    REQUESTS_LEAKED = "RequestsLeaked"
    QUEUES_BLOCKED = "QueuesBlocked"
    QUEUES_STUCK = "QueuesStuck"
    REQUESTS_FAILING = "RequestsFailing"
    NOTHING_FINISHES = "NothingFinishes"
    QUEUES_UNKNOWN = "QueuesUnknown"

    # Repair has stopped at an instance at fault.
    RESTART_DID_NOT_HELP = "RestartDidNotHelp"
    REPLACEMENT_DID_NOT_HELP = "ReplacementDidNotHelp"
    MANY_AT_FAULT = "ManyAtFault"
    REPAIR_BUDGET_SPENT = "RepairBudgetSpent"

    # Memory that engines hold for lost peers.
    NOTHING_UNPROVEN = "NothingUnproven"
    PEER_UNPROVEN = "PeerUnproven"

    # Instances that cannot reach each other.
    PEER_SILENT = "PeerSilent"

    # Transport of KV cache.
    RDMA_IN_USE = "RdmaInUse"
    NOT_RDMA = "NotRdma"
    NOT_PAIRED = "NotPaired"
    TRANSPORT_UNKNOWN = "TransportUnknown"

    # For events only: actions and observations.
    FENCED_PEER = "FencedPeer"
    INSTANCE_CREATED = "InstanceCreated"
    INSTANCE_REPLACED = "InstanceReplaced"
    INSTANCE_DELETED = "InstanceDeleted"
    DRAIN_STARTED = "DrainStarted"
    DRAIN_TIMED_OUT = "DrainTimedOut"
    DRAIN_CANCELLED = "DrainCancelled"
    REPAIR_PROPOSED = "RepairProposed"
    REPAIR_DONE = "RepairDone"
    REPAIR_WITHDRAWN = "RepairWithdrawn"
    ROUTER_ADDED = "RouterAdded"
    ROUTER_REMOVED = "RouterRemoved"
    WORKER_ADDED = "WorkerAdded"
    WORKER_REMOVED = "WorkerRemoved"
    OBJECT_RESTORED = "ObjectRestored"
    OBJECT_ADOPTED = "ObjectAdopted"
