"""Decode's side before an attempt is opened: prefill hears of the requests that our engine has, again and again."""

from collections.abc import Mapping

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import Connect, ExpectAttempt, Linked, Shutdown, Writer
from pdpool_connector.protocol.expecting import Expectation, Expecting
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.machine import Machine
from pdpool_connector.protocol.states import DecodeState
from pdpool_connector.protocol.timeouts import Timeouts


class AnnouncingMachine(Machine[DecodeState]):
    """What decode knows of prefills (`_links`), and tells them of requests that have no attempt yet."""

    def __init__(self, incarnation: str, labels: Mapping[DecodeState, tuple[str, ...]], timing: Timeouts) -> None:
        super().__init__(incarnation, labels, timing)
        self._links: dict[str, tuple[Writer, ...]] = {}
        self._expecting = Expecting(self.timing.max_attempts)
        self._on_event |= {ExpectAttempt: self._on_expect_attempt, Linked: self._on_linked, Shutdown: self._on_shutdown}
        self._on_timer |= {"expect": self._expect_again}

    @property
    def expected(self) -> int:
        """How many requests our engine has announced and not opened."""
        return len(self._expecting)

    def _on_linked(self, event: Linked) -> None:
        self._links[event.prefill] = event.writers
        for row in self._expecting.rows(event.prefill):
            self._expect(row)

    def _on_shutdown(self, _: Shutdown) -> None:
        self.draining = True
        self._expecting.clear()

    def _on_expect_attempt(self, params: ExpectAttempt) -> None:
        row = Expectation(AttemptId(self.incarnation, params.handle), params, self._now + params.deadline_s)
        if self.draining or not self._expecting.add(row):
            return
        self._expect(row)
        if len(self._expecting.rows(params.prefill)) == 1:
            self._expect_later(params.prefill)

    def _expect(self, row: Expectation) -> None:
        """Tell the ranks at which it would be opened."""
        params = row.params
        for writer in self._links.get(params.prefill, ()):
            if self._versions.get(writer.incarnation, 0) >= f.EXPECT_VERSION:
                self._send(
                    writer.incarnation,
                    f.Expect,
                    row,
                    request_id=params.request_id,
                    deadline_s=self._left(row.expires, params.deadline_s),
                    part=writer.part,
                    parts=writer.parts,
                    prompt=params.prompt,
                )

    def _left(self, expires: float, life_s: float) -> float:
        """What is left of a life, never more than all of it: the sum with our clock may have been rounded up."""
        return min(max(expires - self._now, 0.0), life_s)

    def _expect_again(self, prefill: str) -> None:
        self._expecting.expire(prefill, self._now)
        for row in self._expecting.rows(prefill):
            self._expect(row)
        if prefill in self._expecting:
            self._expect_later(prefill)

    def _expect_later(self, prefill: str) -> None:
        self._timers.set(("expect", prefill), self._now + self.timing.expect_s)
        if prefill not in self._links:
            self._effects.append(Connect(prefill))
