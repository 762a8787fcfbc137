"""`docs/troubleshooting.md` has one section for each reason on which a person must act."""

import re
from pathlib import Path

from pdpool_operator.api.condition_docs import REASONS
from pdpool_operator.api.reasons import Reason

DOCS = Path(__file__).parents[4] / "docs"
PASSES = {
    Reason.NO_PODS,
    Reason.STARTING,
    Reason.SCALING_UP,
    Reason.SCALING_DOWN,
    Reason.UPDATING,
    Reason.DRAINING,
    Reason.WAITING,
    Reason.RESTARTING,
    Reason.PURGING,
    Reason.FENCING,
    Reason.ADOPTING,
    Reason.DELETING,
    Reason.NO_INSTANCES,
    Reason.NOT_JUDGED,
    Reason.NOT_PAIRED,
}
"""Reasons that end by themselves."""
GOOD = {
    Reason.SERVING,
    Reason.READY,
    Reason.SCALED_TO_ZERO,
    Reason.ROUTER_DISABLED,
    Reason.SUCCEEDED,
    Reason.QUEUES_FLOWING,
    Reason.NOTHING_UNPROVEN,
    Reason.RDMA_IN_USE,
}


def test_each_reason_to_act_on_has_one_section() -> None:
    sections = re.findall(r"^### (\w+)$", (DOCS / "troubleshooting.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(sections) == sorted(set(Reason) - PASSES - GOOD - set(REASONS["Events only"]))
