"""What is on its way between processes: frames in any order, lost, doubled, or held up by a cut in one direction."""

from dataclasses import dataclass

from pdpool_connector.protocol.frames import AttemptFrame, decode, encode


@dataclass(frozen=True, slots=True)
class Letter:
    """A frame on its way. `name` says what it is without counting, so that a schedule can be shortened around it."""

    name: str
    source: str
    target: str
    frame: AttemptFrame


class Network:
    """All frames that have been sent and not yet delivered. A cut holds letters up; `late` are doubles that linger."""

    def __init__(self) -> None:
        self.letters: list[Letter] = []
        self.late: list[Letter] = []
        self.cuts: set[tuple[str, str]] = set()

    def post(self, letter: Letter) -> None:
        """Take a letter, through the real encoder and decoder."""
        frame = decode(encode(letter.frame))
        assert isinstance(frame, AttemptFrame)
        self.letters.append(Letter(letter.name, letter.source, letter.target, frame))

    def passes(self, letter: Letter) -> bool:
        """False while a cut holds it up."""
        return (letter.source, letter.target) not in self.cuts

    def find(self, name: str) -> Letter | None:
        """The oldest deliverable letter of that name."""
        return next((letter for letter in self.letters if letter.name == name and self.passes(letter)), None)

    def end_connection(self, sender: str, target: str) -> None:
        """What a lost peer had sent comes no more: prefill hears a peer on one connection only."""
        self.letters = [one for one in self.letters if (one.frame.sender, one.target) != (sender, target)]
        self.late = [one for one in self.late if (one.frame.sender, one.target) != (sender, target)]
