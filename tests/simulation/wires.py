"""What a world's network does to frames: it delivers them, or loses, doubles, delays, holds up and forges them."""

import msgspec
from pdpool_connector.protocol.events import Received
from pdpool_connector.protocol.frames import Abort, Drained, Expect, Open

from tests.simulation.ground import check
from tests.simulation.hosts import Hosts
from tests.simulation.network import Letter


class Wires(Hosts):
    """Frames between processes."""

    def deliver(self, name: str) -> bool:
        """A frame arrives."""
        letter = self.network.find(name)
        if letter is None or self.everyone[letter.target].frozen:
            return False
        self.network.letters.remove(letter)
        self.receive(letter)
        return True

    def receive(self, letter: Letter) -> None:
        self.note_announced(letter)
        key = (letter.frame.room, letter.frame.sibling)
        for half in self.do(self.everyone[letter.target], Received(letter.frame)):
            check((half.room, half.sibling) == key, f"{letter.name} for room {key} changed {half}")

    def note_announced(self, letter: Letter) -> None:
        """What this prefill knows from now on of what that decode has not opened."""
        frame, tag = letter.frame, self.tags.get(letter.frame.attempt)
        if isinstance(frame, Expect) and tag is not None and (frame.sender, letter.target) in self.greeted:
            self.announced[letter.target, frame.sender, tag] = self.now + frame.deadline_s
        elif isinstance(frame, Open | Abort | Drained) and tag is not None:
            self.announced.pop((letter.target, frame.sender, tag), None)

    def double(self, name: str) -> bool:
        """A frame arrives, and will arrive once more."""
        letter = self.network.find(name)
        if letter is None or self.everyone[letter.target].frozen:
            return False
        self.receive(letter)
        return True

    def lose(self, name: str) -> bool:
        """A frame never arrives."""
        letter = self.network.find(name)
        if letter is None:
            return False
        self.network.letters.remove(letter)
        return True

    def linger(self, name: str) -> bool:
        """A double of a frame stays behind somewhere, and arrives when everybody has forgotten what it was about."""
        letter = self.network.find(name)
        if letter is None:
            return False
        self.network.late.append(letter)
        return True

    def arrive_late(self) -> bool:
        """What has lingered is on its way again."""
        late, self.network.late = self.network.late, []
        self.network.letters += late
        return bool(late)

    def forge(self, name: str, sender: str, room: int) -> bool:
        """A process that has no part in it, or mixes rooms up, says what another may say."""
        letter, process = self.network.find(name), self.processes[sender]
        if letter is None or (sender, room) == (letter.source, letter.frame.room):
            return False
        if sender != letter.source and process.instance == letter.source.split(".")[0]:
            return False  # fellow ranks of a writer are writers, too
        frame = msgspec.structs.replace(letter.frame, sender=process.incarnation, room=room)
        told = self.do(self.everyone[letter.target], Received(frame))
        check(not told, f"a forged {name} from {sender} for room {room} changed {told}")
        return True

    def cut(self, source: str, target: str) -> bool:
        """Nothing gets through in this direction."""
        link = (source, self.processes[target].incarnation)
        if link in self.network.cuts:
            return False
        self.network.cuts.add(link)
        return True

    def mend(self, source: str, target: str) -> bool:
        """What was held up gets through now, late."""
        link = (source, self.processes[target].incarnation)
        if link not in self.network.cuts:
            return False
        self.network.cuts.remove(link)
        return True
