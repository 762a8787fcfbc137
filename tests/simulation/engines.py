"""What engines of a world ask of the hand-off: requests on both sides, pages as they are computed, and aborts."""

from pdpool_connector.protocol.events import AbortTransfer, ExpectAttempt, OpenAttempt, OpenRequest, SendPages
from pdpool_connector.protocol.frames import AttemptId

from tests.simulation.ground import Ask, check
from tests.simulation.hosts import DEADLINE_S, Hosts
from tests.simulation.memory import Half, pack


class Engines(Hosts):
    """Requests, from the router to the memory that they end in."""

    def ask(self, *fields: object) -> bool:
        """A request is sent to both sides, each gets it at a time of its own.

        Every fourth does not care whether others use its room, where prompts tell them apart; more of them would only
        fill the tables of ends.
        """
        ask = Ask(*fields)  # type: ignore[arg-type] # a schedule holds plain fields
        if (ask.tag % 4 or not self.prompts) and not self.room_is_free(ask):
            return False
        return self.enqueue(ask)

    def ask_again(self, tag: int, new: int) -> bool:
        """Decode has given a request up to make room (a retraction), and both sides get it once more, at any time."""
        ask = self.asks.get(tag)
        if ask is None or new in self.asks or any(posted == tag for posted, _ in self.to_post):
            return False
        return self.room_is_free(ask, ask.request) and self.enqueue(ask._replace(tag=new))

    def enqueue(self, ask: Ask) -> bool:
        self.asks[ask.tag] = ask
        for instance in (ask.prefill, ask.decode):
            for rank in range(self.shape[instance]):
                self.to_post[ask.tag, f"{instance}.{rank}"] = ask
        if ask.tag % 2:
            self.announce(ask)
        return True

    def announce(self, ask: Ask) -> None:
        """Decode's engine says at once what has come. Every other engine does not, or stands still."""
        for rank in range(self.shape[ask.decode]):
            process = self.processes[f"{ask.decode}.{rank}"]
            if not process.frozen:
                handle = next(process.handles)
                self.tags[AttemptId(process.incarnation, handle)] = ask.tag
                place = (*ask.place, ask.rid("decode"))
                self.do(process, ExpectAttempt(handle, *place, DEADLINE_S, self.prompt(ask)))

    def prompt(self, ask: Ask) -> bytes:
        """What engines tell of a request's prompt, for which the request's name stands."""
        return ask.request.encode() if self.prompts else b""

    def room_is_free(self, ask: Ask, but: str = "") -> bool:
        """True when nobody uses the ask's room, other than for the request `but`."""
        users = {a.tag for a in self.asks.values() if a.place == ask.place and a.request != but}
        if any(tag in users for tag, _ in self.to_post):
            return False
        return all(half.ended or half.tag not in users for p in self.processes.values() for half in p.halves.values())

    def decline(self, tag: int, slot: str) -> bool:
        """The engine of a rank will not have a request."""
        return self.post(tag, slot, refused="simulated")

    def post(self, tag: int, slot: str, refused: str = "") -> bool:
        """A rank's half of a request arrives at whatever process is there by then, when it has memory for it."""
        ask, process = self.to_post.get((tag, slot)), self.processes[slot]
        if ask is None or process.frozen:
            return False
        decode = process.role == "decode"
        prefix = ask.prefix if decode else 0
        half = Half(tag, ask.request, ask.room, ask.sibling, prefix, self.now, next(process.handles))
        if not refused and not process.equip(half, pages=ask.pages - prefix, state=ask.state):
            return False
        del self.to_post[tag, slot]
        process.halves[half.handle] = half
        draining = process.machine.draining
        if decode:
            self.tags[AttemptId(process.incarnation, half.handle)] = tag
            params = OpenAttempt(
                handle=half.handle,
                prefill=ask.prefill,
                room=ask.room,
                sibling=ask.sibling,
                request_id=ask.rid("decode"),
                pages=pack(half.pages),
                prefix_pages=ask.prefix,
                aux_slot=half.aux[0] if half.aux else 0,
                state=pack(half.state),
                deadline_s=DEADLINE_S,
                prompt=self.prompt(ask),
                refused=refused,
            )
            self.do(process, params)
        else:
            rid = ask.rid("prefill")
            self.do(
                process, OpenRequest(half.handle, ask.room, ask.sibling, rid, DEADLINE_S, self.prompt(ask), refused)
            )
        check(half.ended or not (draining or refused), f"{slot} drains and has taken something new: {half}")
        return True

    def lose_post(self, tag: int) -> bool:
        """What has not reached prefill of a request never will."""
        lost = [(t, slot) for t, slot in self.to_post if t == tag and slot[0] == "p"]
        for key in lost:
            del self.to_post[key]
        self.lost_asks.update(self.asks[tag].request for _ in lost)
        return bool(lost)

    def send(self, tag: int, slot: str, upto: int) -> bool:
        """Prefill's engine has computed the pages up to `upto`, and hands them over, even if it is over by then."""
        process = self.processes[slot]
        half = process.half_of(tag)
        if half is None or half.releasable or half.closed or process.frozen or not half.sent <= upto <= len(half.pages):
            return False
        half.closed = upto == len(half.pages)
        pages = half.pages[half.sent : upto]
        aux, state = (half.aux[0], pack(half.state)) if half.closed else (None, b"")
        event = SendPages(half.handle, pack(pages), half.sent, half.closed, aux, state)
        half.sent = upto
        self.do(process, event)
        return True

    def abort(self, tag: int, slot: str) -> bool:
        """The engine gives a hand-off up."""
        process = self.processes[slot]
        half = process.half_of(tag)
        if half is None or process.frozen:
            return False
        half.aborted |= not half.ended
        self.do(process, AbortTransfer(half.handle, "simulated"))
        check(half.ended, f"an abort did not end it: {half}")
        return True
