"""The vocabulary of reasons, used by conditions, events, the log field `reason` and the metric label `reason`."""

from enum import StrEnum


class Reason(StrEnum):
    """Reason of a condition or event. CamelCase, as Kubernetes requires."""

    # The user's spec cannot be realised. Nothing changes until the user edits it.
    SPEC_INVALID = "SpecInvalid"
    TEMPLATE_INVALID = "TemplateInvalid"
    NAME_CONFLICT = "NameConflict"
    MISSING_REFERENCE = "MissingReference"
    MISSING_SECRET = "MissingSecret"  # noqa: S105 -- a reason, not a secret
    POOL_NOT_FOUND = "PoolNotFound"
    POOLS_CONTRADICT = "PoolsContradict"

    # Kubernetes cannot run it.
    APPLY_FAILED = "ApplyFailed"
    POD_REJECTED = "PodRejected"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CONTAINER_CONFIG_INVALID = "ContainerConfigInvalid"
    UNSCHEDULABLE = "Unschedulable"
    CRASH_LOOP = "CrashLoop"
    POD_LINGERS = "PodLingers"

    # In progress.
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
    DELETING = "Deleting"

    # Healthy.
    READY = "Ready"
    COMPLETE = "Complete"
    UPDATE_AVAILABLE = "UpdateAvailable"
    SCALED_TO_ZERO = "ScaledToZero"
    ROUTER_DISABLED = "RouterDisabled"

    # Queues: the worst verdict of a pool.
    NO_INSTANCES = "NoInstances"
    QUEUES_FLOWING = "QueuesFlowing"
    QUEUES_SATURATED = "QueuesSaturated"
    QUEUES_BLOCKED = "QueuesBlocked"
    QUEUES_STUCK = "QueuesStuck"
    REQUESTS_FAILING = "RequestsFailing"
    NOTHING_FINISHES = "NothingFinishes"
    QUEUES_UNKNOWN = "QueuesUnknown"

    # Memory that engines hold for lost peers.
    NOTHING_UNPROVEN = "NothingUnproven"
    PEER_UNPROVEN = "PeerUnproven"

    # For events only: actions and observations.
    FENCED_PEER = "FencedPeer"
    FENCE_REFUSED = "FenceRefused"
    INSTANCE_CREATED = "InstanceCreated"
    INSTANCE_REPLACED = "InstanceReplaced"
    INSTANCE_DELETED = "InstanceDeleted"
    DRAIN_STARTED = "DrainStarted"
    DRAIN_TIMED_OUT = "DrainTimedOut"
    DRAIN_CANCELLED = "DrainCancelled"
    WORKER_ADDED = "WorkerAdded"
    WORKER_REMOVED = "WorkerRemoved"
