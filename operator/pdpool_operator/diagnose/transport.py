"""Decides from connectors' peers over which transport KV cache travels, and which instances must not serve for it.

Prefill writes, so only a prefill connector knows the transport to a peer. A *pair* is a prefill rank and a decode rank
that have paired. Its transport, as the prefill rank reports it, is

    "rdma"        RDMA
    ""            unknown: the transfer backend does not report it
    else          another transport: "tcp", "cma" (the kernel copies within one host), ...

Under `rdma.mode: Required`, every pair of another transport has an *unfit* end. An instance with a pair over RDMA is
*proven*.

1. A pair with one proven end: its other end is unfit.
2. A pair that step 1 gave no unfit end, with no proven end: both ends are unfit.
3. A pair with two proven ends: its decode end is unfit.

So one decode instance without a device does not take all prefill instances with it. An instance without a pair is fit:
it can pair only while it gets requests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..api.names import Role
from ..api.rdma import RdmaMode, RdmaSpec
from .model import Diagnosis, Pair, Subject

RDMA = "rdma"
UNKNOWN = ""


@dataclass(frozen=True, slots=True)
class _End:
    """One rank, or a process that is no rank of a known instance. `instance` is empty then."""

    instance: str
    shown: str


@dataclass(frozen=True, slots=True)
class _Link:
    prefill: _End
    decode: _End
    pair: Pair

    @property
    def ends(self) -> frozenset[str]:
        return frozenset({self.prefill.instance, self.decode.instance} - {""})


def with_transports(
    diagnoses: Sequence[Diagnosis], others: Sequence[Subject], rdma: RdmaSpec | None
) -> tuple[Diagnosis, ...]:
    """Return the diagnoses of one pool with each instance's pairs, and why it must not serve, if so.

    Args:
        diagnoses: of the instances of one pool.
        others: instances of the other role that work with them.
        rdma: `spec.rdma` of the pool.
    """
    links = tuple(_links([*(diagnosis.subject for diagnosis in diagnoses), *others]))
    if not links:
        return tuple(diagnoses)
    required = rdma is not None and rdma.mode is RdmaMode.REQUIRED
    unfit = _unfit([link for link in links if uses_another(link.pair)], _proven(links)) if required else frozenset()
    return tuple(_with_links(diagnosis, links, unfit) for diagnosis in diagnoses)


def uses_another(pair: Pair) -> bool:
    """Whether the pair is known to use another transport than RDMA."""
    return pair.transport not in {RDMA, UNKNOWN}


def _with_links(diagnosis: Diagnosis, links: Sequence[_Link], unfit: frozenset[str]) -> Diagnosis:
    name = diagnosis.subject.name
    mine = sorted(link.pair for link in links if name in link.ends)
    why = next((f"{pair}, and rdma.mode is Required" for pair in mine if uses_another(pair)), "")
    return replace(diagnosis, pairs=tuple(mine), unfit=why if name in unfit else "")


def _proven(links: Sequence[_Link]) -> frozenset[str]:
    return frozenset(end for link in links if link.pair.transport == RDMA for end in link.ends)


def _unfit(offending: Sequence[_Link], proven: frozenset[str]) -> frozenset[str]:
    guilty = frozenset(end for link in offending if link.ends & proven for end in link.ends - proven)
    unexplained = [link for link in offending if not link.ends & guilty]
    suspects = frozenset(
        end for link in unexplained for end in (link.ends if not link.ends & proven else {link.decode.instance})
    )
    return guilty | suspects


def _links(subjects: Sequence[Subject]) -> Iterator[_Link]:
    """Return all pairs that prefill ranks report, with the names of known decode ranks."""
    tracks = [(subject, track, track.answer) for subject in subjects for track in subject.tracks]
    writers = [(s, t, a.peers) for s, t, a in tracks if s.role is Role.PREFILL and a is not None and a.peers]
    if not writers:
        return
    decode = {a.incarnation: _end(s, t.latest.rank) for s, t, a in tracks if s.role is Role.DECODE and a is not None}
    for subject, track, peers in writers:
        writer = _end(subject, track.latest.rank)
        for peer in peers:
            target = decode.get(peer.incarnation) or _End("", f"process {peer.incarnation[:8]}")
            yield _Link(writer, target, Pair(writer.shown, target.shown, peer.backend, peer.transport))


def _end(subject: Subject, rank: int) -> _End:
    return _End(subject.name, f"{subject.name} rank {rank}" if len(subject.tracks) > 1 else subject.name)
