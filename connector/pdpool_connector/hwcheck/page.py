"""The page that `pdpool hwcheck` writes: Markdown, one table of the machine, one of the trials."""

import platform
from collections.abc import Sequence
from datetime import UTC, datetime

from pdpool_connector.hwcheck.machine import Machine
from pdpool_connector.hwcheck.peer import PAGE_BYTES
from pdpool_connector.hwcheck.trials import PAGES, Outcome


def render(machine: Machine, outcomes: Sequence[Outcome], version: str) -> str:
    """The whole page."""
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    lines = [
        "# Hardware check",
        "",
        f"pdpool {version}, {when}, {platform.machine()}, kernel {platform.release()}.",
        f"Each trial moves {PAGES} pages of {PAGE_BYTES} bytes in two regions from one process to another and compares",
        "every byte. It aborts a hand-off in mid-send and reuses its pages. It kills the sender.",
        "",
        "| machine | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in _facts(machine)),
        "",
        "| trial | result | transport in use | why |",
        "|---|---|---|---|",
        *map(_row, outcomes),
        "",
        summary(outcomes),
        "",
    ]
    return "\n".join(lines)


def summary(outcomes: Sequence[Outcome]) -> str:
    """The last line: how many trials were proved, skipped and failed."""
    words = [outcome.word for outcome in outcomes]
    counts = " ".join(f"{word}={words.count(word)}" for word in ("proved", "skipped", "failed"))
    return f"hwcheck {'failed' if 'failed' in words else 'ok'}: {counts}"


def _facts(machine: Machine) -> list[tuple[str, str]]:
    ports = [
        f"{port.device} port {port.port}: {port.link_layer}, {'active' if port.active else 'not active'}, "
        f"GIDs {', '.join(f'{index} {gid} {kind}'.strip() for index, gid, kind in port.gids) or 'none'}"
        for port in machine.rdma
    ]
    return [
        ("GPUs", ", ".join(machine.gpus) or "none"),
        ("RDMA ports", "; ".join(ports) or "none"),
        ("/dev/infiniband", ", ".join(machine.verbs_devices) or "none"),
        ("RLIMIT_MEMLOCK", "unlimited" if machine.memlock_bytes is None else f"{machine.memlock_bytes} bytes"),
        ("shared memory", f"{machine.shm_bytes} bytes free"),
    ]


def _row(outcome: Outcome) -> str:
    trial = outcome.trial
    failures = "; ".join(f"{check}: {why}" for check, why in outcome.checks.items() if why)
    why = trial.skip or failures or ", ".join(outcome.checks)
    return f"| {trial.name} | {outcome.word} | {outcome.transport} | {why.replace('|', '/')} |"
