"""All drills, with the words that pdpool must give in each."""

from typing import Final

from proof.cluster.words import Expected
from proof.drills import failures, rollouts
from proof.drills.scenario import Scenario

ROLLING: Final = (
    r"\w+ (Ready=False|Reconciling=True) (Updating|Draining|Starting|ScalingUp|ScalingDown)",
    r"pdsvc (Ready=False|Reconciling=True) RouterListOutdated",
    r"event \w+ (InstanceCreated|InstanceReplaced|InstanceDeleted|DrainStarted|WorkerAdded|WorkerRemoved)",
)
"""True while instances are replaced, created or removed in good order."""
FALLEN: Final = (r"\w+ (Ready=False|Reconciling=True) EnginesNotReady", r"event \w+ EnginesNotReady")
"""True while an instance that served cannot serve."""
UNKNOWN: Final = (r"\w+ QueuesHealthy=Unknown (QueuesUnknown|NotJudged|Starting|Draining)",)
"""True while an instance, or the operator, has just started or does not answer."""
FENCED: Final = (r"event \w+ FencedPeer", r"\w+ HoldsProvable=False PeerUnproven", r"event \w+ PeerUnproven")
"""True after a process has ended with hand-offs under way."""
ROUTERS: Final = (
    r"pdsvc (RouterReady=False|Ready=False|Reconciling=True) (RouterNotReady|RouterListOutdated|Starting|Updating)",
    r"event pdsvc (RouterNotReady|RouterRemoved|RouterAdded)",
)
"""True while a router is replaced."""
API_LOST: Final = (
    r"\w+ (Ready=False|Reconciling=True) (ApiFailing|NodeNotReady|PoolsNotReady)",
    r"event \w+ (ApiFailing|NodeNotReady|PoolsNotReady)",
    r"pdsvc RouterReady=False (NodeNotReady|RouterNotReady)",
    r"event pdsvc (WorkerRemoved|WorkerAdded)",
    r"alert PdpoolOperatorDown",
)
"""True after an outage of the API server, in which no kubelet could report either."""
SAID_ROLLOUT: Final = (r"dpool Ready=False (Updating|Draining)", r"event pdsvc WorkerRemoved")
AT_ONCE: Final = 3
"""Requests under way at any time: one for each client of the traffic. A router that is killed loses its own."""
REFUSED_BY_A_LOST_NODE: Final = 600
"""Until the operator takes the router of that node out of its Service, half of new connections are refused. That takes
up to 10 s, and the clients try again at once. Kubernetes alone takes 40 s, and cost 1027 to 1431 tries.
"""
REFUSED: Final = 30
"""Until Kubernetes takes a killed router out of its Service, half of new requests are refused. This allows a second:
each of three clients sends at most 20 in that time."""


def _unfit(*reasons: str) -> tuple[str, ...]:
    """Return the words of these reasons for a decode pool and its service."""
    named = "|".join(reasons)
    return (
        rf"(dpool|pdsvc) (Ready=False|Reconciling=True|Stalled=True) ({named})",
        rf"event (dpool|pdsvc) ({named})",
    )


def _failing(kind: str) -> tuple[str, ...]:
    """Return the words about a pool with an instance that fails, and about its service."""
    return (
        rf"({kind}|pdsvc) QueuesHealthy=False RequestsFailing",
        rf"{kind} (Ready=False|Reconciling=True) EnginesNotReady",
        r"pdsvc (Ready=False|Reconciling=True) RouterListOutdated",
        rf"event ({kind}|pdsvc) (RequestsFailing|EnginesNotReady|WorkerAdded)",
    )


DRILLS: Final = (
    Scenario(
        "roll-out-one",
        "a new template of the decode pool",
        rollouts.one_pool,
        Expected(SAID_ROLLOUT, ROLLING + UNKNOWN),
        lasts_s=90,
    ),
    Scenario(
        "roll-out-both",
        "new templates of both pools at the same time",
        rollouts.both_pools,
        Expected((*SAID_ROLLOUT, r"ppool Ready=False (Updating|Draining)"), ROLLING + UNKNOWN),
        lasts_s=120,
    ),
    Scenario(
        "roll-out-reverted",
        "a new template that is taken back when one engine has it",
        rollouts.reverted_half_way,
        Expected(SAID_ROLLOUT, ROLLING + UNKNOWN),
        lasts_s=180,
    ),
    Scenario(
        "roll-out-broken",
        "three templates in a row that cannot run",
        rollouts.three_broken,
        Expected(
            (
                "dpool Ready=False ImagePullFailed",
                "dpool Ready=False CrashLoop",
                "dpool Ready=False Unschedulable",
            ),
            ROLLING + UNKNOWN + _unfit("ImagePullFailed", "CrashLoop", "Unschedulable"),
        ),
        lasts_s=240,
    ),
    Scenario(
        "scale-in-unfit",
        "decode from 4 to 2 while one instance is Pending and one Stuck",
        rollouts.scale_in_unfit,
        Expected(
            (
                "dpool Ready=False Unschedulable",
                "dpool QueuesHealthy=False QueuesStuck",
                "event dpool InstanceDeleted",
            ),
            ROLLING
            + UNKNOWN
            + FALLEN
            + FENCED
            + _unfit("Unschedulable")
            + (
                r"pdsvc QueuesHealthy=False QueuesStuck",
                r"(ppool|pdsvc) QueuesHealthy=False QueuesBlocked",
                r"event \w+ (QueuesStuck|QueuesBlocked|DrainTimedOut|RepairProposed)",
                r"alert PdpoolInstanceStuck",
            ),
        ),
        lasts_s=240,
    ),
    Scenario(
        "failing-decode",
        "one decode engine of two fails everything",
        failures.failing_decode,
        Expected(
            ("dpool QueuesHealthy=False RequestsFailing", "alert PdpoolInstanceFailing", "event pdsvc WorkerRemoved"),
            # Prefill's halves wait for 15 s. Nothing moves while all three clients meet the failing engine twice.
            (*_failing("dpool"), "alert PdpoolPrefillBootstrapQueueStuck"),
        ),
        lasts_s=150,
    ),
    Scenario(
        "failing-prefill",
        "one prefill engine of two fails everything",
        failures.failing_prefill,
        Expected(
            ("ppool QueuesHealthy=False RequestsFailing", "alert PdpoolInstanceFailing", "event pdsvc WorkerRemoved"),
            _failing("ppool"),
        ),
        lasts_s=150,
    ),
    Scenario(
        "no-decode-left",
        "no decode engine can run",
        rollouts.no_decode_left,
        Expected(
            (
                "dpool Available=False Unschedulable",
                "pdsvc Available=False PoolsNotReady",
                "alert PdpoolServiceCannotServe",
            ),
            ROLLING
            + UNKNOWN
            + FALLEN
            + FENCED
            + _unfit("Unschedulable")
            + (
                r"(event pdsvc|pdsvc (Ready=False|Reconciling=True)) PoolsNotReady",
                r"(dpool|pdsvc) Available=False (EnginesNotReady|Starting|Draining|PoolsNotReady|RouterNotReady)",
                r"pdsvc (RouterReady=False|Ready=False|Reconciling=True) RouterNotReady",
                r"event (pdsvc RouterNotReady|dpool Starting)",
                r"\w+ QueuesHealthy=False (NothingFinishes|QueuesBlocked)",
                r"event \w+ (NothingFinishes|QueuesBlocked)",
                r"alert (PdpoolNothingFinishes|PdpoolPrefillBootstrapQueueStuck)",
            ),
            may_lose=1_000_000,
        ),
        lasts_s=180,
    ),
    Scenario(
        "kubelet-silent",
        "a kubelet is silent for 2 minutes",
        failures.kubelet_silent,
        Expected(
            (r"dpool Ready=False NodeNotReady",),
            (
                r"\w+ (Ready=False|Reconciling=True|RouterReady=False) NodeNotReady",
                r"event \w+ NodeNotReady",
                # For a moment, the Deployment of the routers says so, and its pods do not yet.
                r"pdsvc (Ready=False|Reconciling=True|RouterReady=False) RouterNotReady",
                # The node may be dead, so its engines leave the rotation while others serve.
                r"event pdsvc (WorkerRemoved|WorkerAdded)",
            ),
        ),
        lasts_s=200,
    ),
    Scenario(
        "node-lost",
        "a node is lost with all its pods",
        failures.node_lost,
        Expected(
            (r"\w+ Ready=False (NodeNotReady|PodLingers|EnginesNotReady|RouterNotReady|Starting)",),
            ROLLING
            + UNKNOWN
            + FALLEN
            + FENCED
            + ROUTERS
            + _failing("ppool")
            + _failing("dpool")
            + (
                r"\w+ (Ready=False|Reconciling=True|RouterReady=False) (NodeNotReady|PodLingers)",
                r"event \w+ (NodeNotReady|PodLingers)",
            ),
            may_lose=AT_ONCE + REFUSED_BY_A_LOST_NODE,
        ),
        lasts_s=240,
    ),
    Scenario(
        "api-server-frozen",
        "the API server is frozen for 75 s",
        failures.api_server_frozen,
        Expected((), UNKNOWN + API_LOST),
        lasts_s=150,
    ),
    Scenario(
        "operator-away",
        "the operator is away for 5 minutes",
        failures.operator_away,
        Expected(("alert PdpoolOperatorDown", r"event dpool InstanceCreated"), ROLLING + UNKNOWN),
        lasts_s=390,
    ),
    Scenario(
        "router-lost",
        "one router of two is killed",
        failures.router_lost,
        Expected((r"pdsvc RouterReady=False RouterNotReady",), ROUTERS, may_lose=AT_ONCE + REFUSED),
        lasts_s=80,
    ),
    Scenario(
        "drain-frozen",
        "the scheduler of a decode engine hangs while it drains",
        rollouts.drain_frozen,
        Expected(
            ("event dpool DrainStarted", "event dpool DrainTimedOut", "event dpool InstanceDeleted"),
            ROLLING
            + UNKNOWN
            + FALLEN
            + FENCED
            + (
                r"(dpool|pdsvc) QueuesHealthy=False QueuesStuck",
                r"(ppool|pdsvc) QueuesHealthy=False QueuesBlocked",
                r"event \w+ (QueuesStuck|QueuesBlocked|RepairProposed)",
                r"alert (PdpoolInstanceStuck|PdpoolPrefillBootstrapQueueStuck)",
            ),
        ),
        lasts_s=150,
    ),
)
