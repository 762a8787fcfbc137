"""How processes of a world find each other, lose each other, and are proved dead."""

from collections import Counter
from typing import cast

from pdpool_connector.protocol.events import Event, Fenced, Linked, PeerLost, PeerReady, Unreachable
from pdpool_connector.protocol.frames import VERSION_MAX
from pdpool_connector.protocol.status import Cause, Phase

from tests.simulation.ground import check
from tests.simulation.hosts import Hosts
from tests.simulation.kinds import AnyDecode
from tests.simulation.memory import Half
from tests.simulation.processes import Process


class Links(Hosts):
    """Pairing between decodes and the ranks of prefill instances."""

    def wanted(self) -> list[tuple[str, str]]:
        """Decodes that want to reach a prefill instance, or are owed a word by it."""
        return [
            (process.slot, prefill)
            for process in self.processes.values()
            if process.role == "decode" and not process.frozen
            for prefill in self.shape
            if prefill[0] == "p" and (prefill in process.wants or self.owed(process, prefill))
        ]

    def owed(self, process: Process, prefill: str) -> bool:
        machine = cast("AnyDecode", process.machine)
        return machine.holds_for(prefill) and not self.is_linked(process, prefill)

    def is_linked(self, process: Process, prefill: str) -> bool:
        ranks = self.serving(process, prefill)
        return all((process.incarnation, rank.incarnation) in self.linked for rank in ranks)

    def greet(self, slot: str, prefill: str) -> bool:
        """Decode says hello to a rank that has not answered yet; another process at its address replaces it."""
        process = self.processes[slot]
        if (slot, prefill) not in self.wanted():
            return False
        for rank in self.serving(process, prefill):
            link = (process.incarnation, rank.incarnation)
            if link not in self.answered and not rank.frozen:
                for old in [d for d, p in self.greeted if p == rank.incarnation and self.everyone[d].slot == slot]:
                    self.lost(rank.slot, old)
                self.greeted.add(link)
                self.answered.add(link)
                told = self.do(rank, PeerReady(process.incarnation, VERSION_MAX))
                check(not told, f"a greeting of {slot} changed {told}")
                return True
        return False

    def link(self, slot: str, prefill: str) -> bool:
        """Decode has heard from every rank that it is paired; what was there before at that address is lost."""
        process = self.processes[slot]
        ranks = self.serving(process, prefill)
        links = [(process.incarnation, rank.incarnation) for rank in ranks]
        if (slot, prefill) not in self.wanted() or not self.answered.issuperset(links):
            return False
        here = {rank.incarnation for rank in ranks}
        for old in [p for d, p in self.linked if d == process.incarnation and self.everyone[p].instance == prefill]:
            if old not in here:
                self.lost(slot, old)
        process.wants.discard(prefill)
        self.linked.update(links)
        for rank in ranks:
            self.do(process, PeerReady(rank.incarnation, VERSION_MAX))
        self.do(process, Linked(prefill, self.roles(process, prefill)))
        return True

    def refuse(self, slot: str, prefill: str) -> bool:
        """The address cannot be paired with in time."""
        process = self.processes[slot]
        if prefill not in process.wants or self.is_linked(process, prefill) or process.frozen:
            return False
        process.wants.discard(prefill)
        self.do(process, Unreachable(prefill, Cause.PEER_LOST, "simulated"))
        return True

    def lost(self, slot: str, peer: str) -> bool:
        """One side has evidence that the other is gone; the other side may not have noticed anything."""
        process = self.processes[slot]
        link = (process.incarnation, peer) if process.role == "decode" else (peer, process.incarnation)
        links = self.linked if process.role == "decode" else self.greeted
        if link not in links or process.frozen:
            return False
        links.discard(link)
        self.answered.discard(link)
        if process.role == "prefill":
            self.network.end_connection(peer, process.incarnation)
        waiting = self.waiting_for(process, peer)
        self.hit(process, peer, PeerLost(peer, "simulated"))
        for half in waiting:
            check(half.ended, f"it waits for a decode that had announced it and is gone: {half}")
        return True

    def waiting_for(self, process: Process, peer: str) -> list[Half]:
        """Halves at prefill that this decode has announced and not opened, less those that were asked for twice."""
        asked = Counter(ask.request for ask in self.asks.values())
        known = [key for key, until in self.announced.items() if until > self.now]
        tags = [tag for prefill, decode, tag in known if (prefill, decode) == (process.incarnation, peer)]
        halves = [process.half_of(tag) for tag in tags if asked[self.asks[tag].request] == 1]
        return [half for half in halves if half and half.last and half.last.phase is Phase.WAITING]

    def hit(self, process: Process, peer: str, event: Event) -> None:
        """Something befalls a peer; hand-offs with others go on."""
        instance = self.everyone[peer].instance
        for half in self.do(process, event):
            mine = self.asks[half.tag]
            # Without prompts, a half may have met any of its place.
            asks = [mine] if self.prompts else [ask for ask in self.asks.values() if ask.place == mine.place]
            known = any(instance in (ask.prefill, ask.decode) for ask in asks)
            check(known, f"{event} changed a hand-off with others: {half}")

    def unnoticed(self) -> list[tuple[str, str]]:
        """Who has not noticed yet that a peer is dead."""
        pairs = [(self.everyone[d], self.everyone[p]) for d, p in sorted(self.linked)]
        pairs += [(self.everyone[p], self.everyone[d]) for d, p in sorted(self.greeted)]
        return [(a.slot, b.incarnation) for a, b in pairs if a.alive and not b.alive and not a.frozen]

    def fence(self, incarnation: str) -> bool:
        """Proof that a dead process touches memory no more: its bytes have stopped, and then everybody is told.

        It is told once, also to those who have not noticed the death: nothing that they offer later may go there.
        """
        dead = self.everyone.get(incarnation)
        if dead is None or dead.alive or dead.fenced or any(process.frozen for process in self.processes.values()):
            return False
        dead.fenced = True
        self.sever(dead)
        for process in self.processes.values():
            self.hit(process, incarnation, Fenced(incarnation, "simulated"))
        return True

    def vouch(self) -> None:
        """Unsettled transfers between the living: nobody can tell that one is over before one of the two has ended."""
        for mover, peer in self.unsettled:
            if mover.alive and peer.alive:
                self.crash((mover, peer)[self.done % 2].slot)
        self.unsettled.clear()
