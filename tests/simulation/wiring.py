"""Mutants that a unit test must catch: most are of the runtime's wiring, which the simulation does not run.

The test runs on a copy of the checkout with the fault in it.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.simulation.mutants import Mutant, NotTriedError, mutated

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "connector/pdpool_connector"
COPIED = ("connector", "tests", "pyproject.toml")
LINKED = ("operator", "dev", "proof", "docs", "examples", "charts", "crds")
"""Read by tests, and never changed."""
ONE_RUN_S = 240.0


_UNIT = "tests/unit"
_ROWS = (
    ("the worker submits after stop", "H2", "a stopped job goes on to its next chunk",
     "runtime/worker.py", "PeerWorker._next", "job.stopped", "False",
     "runtime/test_worker.py", "test_stop_submits_no_chunk_and_waits"),
    ("an error of poll is settled", "H4", "a backend call that fails is taken for the end of its bytes",
     "runtime/worker.py", "PeerWorker._conclude", "outcome is Poll.FAILED_UNSETTLED", "False",
     "runtime/test_worker_staging.py", "test_slot_is_kept_while_it_may_be_read"),
    ("close does not wait for the worker", "H35", "the worker ends while its chunks are in flight",
     "runtime/worker.py", "PeerWorker._work", "self._closing and not self._jobs and not self._flights",
     "self._closing",
     "runtime/test_worker.py", "test_close_waits_for_chunks_in_flight"),
    ("the loop waits for a worker", "H22", "a small write behind a large one to a frozen peer stops the loop",
     "runtime/worker.py", "PeerWorker.write_now", "self._hands.acquire(blocking=False)", "self._hands.acquire()",
     "runtime/test_worker_small.py", "test_caller_never_waits_for_a_large_write"),
    ("staging slots are never given back", "H24", "staging has no room left, though nothing is under way",
     "runtime/worker.py", "PeerWorker._unstage", "chunk.staged.release()", "None",
     "runtime/test_worker_staging.py", "test_slot_is_given_back_when_chunk_settles"),
    ("a proof needs no look at connections", "H9", "a peer is fenced while its connections to us still stand",
     "runtime/remote_fencer.py", "RemoteFencer._suffices",
     "bool(addresses) and not leading_to(addresses, table & self._frozen.get(peer, table))", "True",
     "runtime/test_remote_fencer.py", "test_peer_is_fenced_when_its_connections_end"),
    ("any connection may send as a peer", "H11", "a frame is not compared with the connection that it comes by",
     "runtime/peer_table.py", "PeerTable.sender", "peer.route != route and route not in peer.routes", "False",
     "runtime/test_peer_table.py", "test_decode_may_use_two_connections"),
    ("deadlines are never armed", "H21", "the machine's next deadline gets no timer",
     "runtime/connector.py", "Connector._after_turn", 'self._reactor.at("machine", due, self._on_deadline)', "None",
     "runtime/test_attached.py", "test_deadline_releases"),
    ("closed sockets have their turn", "H34", "a socket that was closed in the same turn is read, and the loop ends",
     "runtime/reactor.py", "Reactor._read", "(reader := self._readers.get(number)) is None",
     "(reader := self._readers[number]) is None",
     "runtime/test_reactor.py", "test_descriptor_closed_in_turn_is_not_served"),
    ("drops are not counted", "H13", "a dropped frame leaves no trace",
     "transport/drops.py", "Drops.note", "self._counts[reason] += 1", "",
     "transport/test_drops.py", "test_all_is_counted_and_little_logged"),
    ("a malformed frame raises", "H14", "a malformed frame ends the turn of the loop that reads it",
     "transport/control.py", "_checked", "MalformedFrameError", "KeyError",
     "transport/test_control.py", "test_malformed_message_is_dropped"),
    ("any bootstrap host is contacted", "H30", "a host outside the allowed networks is contacted",
     "transport/address.py", "pick_allowed", "is_allowed(ip, networks)", "True",
     "transport/test_bootstrap.py", "test_only_allowed_networks_are_resolved"),
    ("the floor is ignored", "H19", "an attempt whose tombstone has expired is new",
     "protocol/prefill.py", "PrefillMachine._on_open", "self._tombstones.forgotten(frame.attempt)", "False",
     "protocol/test_prefill_ends.py", "test_late_frame_of_forgotten_attempt_does_not_resurrect"),
    ("the floor is off by one", "H19", "the attempt that was forgotten last is new",
     "protocol/tombstones.py", "TombstoneTable.forgotten",
     "attempt.number <= self._floor.get(attempt.decode, -1)", "attempt.number < self._floor.get(attempt.decode, -1)",
     "protocol/test_prefill_ends.py", "test_late_frame_of_forgotten_attempt_does_not_resurrect"),
    ("the fenced are still paired", "H5", "a frame of a fenced process opens an attempt",
     "protocol/machine.py", "Machine._on_fenced", "self._versions.pop(event.peer, None)", "",
     "protocol/test_prefill_ends.py", "test_fenced_decode_opens_nothing"),
    ("tombstones have no bound", "H29", "any number of ends is remembered",
     "protocol/bounded_table.py", "BoundedTable.full",
     'len(self._rows) + reserved >= self._limit or (peer != "" and of_peer >= self._limit // 2)', "False",
     "protocol/test_tables.py", "test_no_room_raises_floor_instead"),
    ("rank groups are mixed", "H11", "ranks of different decode instances join one hand-off",
     "protocol/rooms.py", "_lacks", "same and frame.rank_index not in handoff.ranks",
     "frame.rank_index not in handoff.ranks",
     "protocol/test_ranks.py", "test_other_rank_waits_for_its_own_request"),
    ("prefill's refusal is not sent", "H36", "decode is not informed that prefill drains",
     "protocol/prefill.py", "PrefillMachine._on_new_attempt", "self._refuse(frame, Cause.REFUSED, DRAINING)", "",
     "protocol/test_prefill_ends.py", "test_drain_finishes_known_requests_and_refuses_new"),
)  # fmt: skip
WIRING = {
    name: Mutant(name, hazard, why, file, function, old, new, (f"{_UNIT}/{test}", "-k", sign), sign)
    for name, hazard, why, file, function, old, new, test, sign in _ROWS
}


def outcome_of(tests: tuple[str, ...], mutant: Mutant | None = None) -> str:
    """Run tests on a copy, with a fault or without. Returns the line that names what failed, "" when all passed.

    Raises NotTriedError when nothing ran.
    """
    with tempfile.TemporaryDirectory(prefix="pdpool-wiring-") as place:
        copy = Path(place)
        for name in COPIED:
            source = ROOT / name
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, copy / name, ignore=ignored) if source.is_dir() else shutil.copy(source, copy)
        for name in LINKED:
            (copy / name).symlink_to(ROOT / name)
        if mutant is not None:
            (copy / PACKAGE / mutant.file).write_text(ast.unparse(mutated(mutant)))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *tests]
        paths = os.pathsep.join(str(copy / name) for name in ("operator", "connector", "."))
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": paths}
        ran = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=ONE_RUN_S, check=False)
    if ran.returncode == 0 and re.search(r"\b[1-9]\d* passed", ran.stdout):
        return ""
    failed = re.search(r"^FAILED .*", ran.stdout, re.MULTILINE)
    if ran.returncode != 1 or failed is None:
        raise NotTriedError(
            f"pytest {' '.join(tests)} ended with {ran.returncode}:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}"
        )
    return failed.group()


def caught_by(mutant: Mutant) -> str | None:
    """What failed because of the fault; None when it survived, or something else failed than must."""
    failed = outcome_of(mutant.tests, mutant)
    return failed if mutant.sign in failed else None
