"""What queue, logs and metrics know of an object that is reconciled."""

from typing import Protocol


class ObjectKey(Protocol):
    """Fields of a key that logs and metrics use."""

    @property
    def kind(self) -> str:
        """Kind of the object."""

    @property
    def namespace(self) -> str:
        """Its namespace."""

    @property
    def name(self) -> str:
        """Its name."""

    def __hash__(self) -> int: ...
