"""Count bytes that land after the proof that no write is under way, and print the table."""

import sys
import tempfile
from dataclasses import dataclass, field

import click

from proof.fences.experiments import EVENTS, Event
from proof.fences.peers import ExperimentError, writing
from proof.fences.plan import PLANES, SIZES, Plane

REPETITIONS = 10
"""Half of them with small writes, half with large ones."""


@dataclass
class Row:
    """What came of one event on one data plane: late bytes of each repetition."""

    plane: Plane
    event: Event
    late: list[int] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """What the experiment says of this event as a proof."""
        return "no proof: bytes came" if any(self.late) else "no late byte seen"

    def __str__(self) -> str:
        late, worst = sum(count > 0 for count in self.late), max(self.late, default=0)
        return (
            f"| {self.plane.backend} | {self.plane.transport} | {self.event.name} | {len(self.late)} | {late} "
            f"| {worst} | {self.verdict} |"
        )


def run(plane: Plane, event: Event, repetitions: int, log: int) -> Row:
    """All repetitions of one experiment."""
    row = Row(plane, event)
    for turn in range(repetitions):
        with writing(plane, tuple(SIZES)[turn % len(SIZES)], log) as pair:
            row.late.append(event.run(pair))
    return row


@click.command(help=__doc__)
@click.option("--repetitions", type=click.IntRange(1), default=REPETITIONS, show_default=True)
@click.option("--backend", "backends", multiple=True, help="Only these transfer backends.")
def main(repetitions: int, backends: tuple[str, ...]) -> None:
    """Print rows as they come."""
    click.echo("| backend | transport | event | repetitions | with late bytes | most late bytes | verdict |")
    click.echo("|---|---|---|---|---|---|---|")
    with tempfile.NamedTemporaryFile(prefix="pdpool-fences-", suffix=".log", delete=False) as log:
        for plane in PLANES:
            for event in EVENTS:
                if backends and plane.backend not in backends:
                    continue
                if f"{plane.backend}/{plane.transport}" not in event.planes:
                    continue
                try:
                    click.echo(str(run(plane, event, repetitions, log.fileno())))
                except ExperimentError as error:
                    click.echo(
                        f"fences failed: {plane.backend} over {plane.transport}, {event.name}: {error}", err=True
                    )
                    click.echo(f"what the processes logged: {log.name}", err=True)
                    sys.exit(1)


if __name__ == "__main__":
    main()
