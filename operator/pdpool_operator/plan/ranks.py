"""Which ranks a pod has, and which of them can be asked."""

from collections.abc import Mapping

from ..observe.model import ObservedPod
from ..observe.samples import RankSample


def ranks_of(samples: Mapping[int, RankSample]) -> range:
    """Return all ranks: those that were sampled, and as many as their connectors report; one at least."""
    reported = (sample.connector.ranks for sample in samples.values() if sample.connector is not None)
    return range(max(1, len(samples), *reported))


def silence(rank: int, pod: ObservedPod, samples: Mapping[int, RankSample]) -> str:
    """Return why a rank cannot be asked now. Empty if it can."""
    sample = samples.get(rank)
    if sample is None or pod.ip is None:
        return "has not been sampled"
    if sample.connector is None:
        return f"does not answer ({sample.connector_error})"
    # The address may belong to another pod by now.
    return "" if sample.connector.pod_uid == pod.uid else "does not answer (another pod has its address)"
