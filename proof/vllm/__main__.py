"""Run real vLLM 0.32 on CPU with pdpool's connector: tokens, aborts and faults, in about 10 minutes.

The first run makes environments of about 7.5 GB.
"""

import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import Final, NoReturn

import click

from dev.paths import cache_dir
from proof.engines.environment import EnginesError
from proof.vllm.environment import Environment, ensure
from proof.vllm.parts import FAULTS, Counts, aborts, full, through_router, tokens
from proof.vllm.servers import Pair

PROMPTS: Final = 40
ABORTS: Final = 200
TIMES: Final = 3


async def play(environment: Environment, folder: Path, prompts: int, abort: int, times: int) -> Counts:
    """Run all parts."""
    with Pair(environment, folder, prefill_tensor=2) as pair:
        found = await tokens(pair, prompts)
    with Pair(environment, folder) as pair:
        found += await tokens(pair, prompts)
        found += await through_router(pair, folder, prompts)
        found += await full(pair)
        found += await aborts(pair, abort)
        for number in range(times):
            for fault in FAULTS:
                found += await fault(pair, number)
    return found


def _terminated(*_: object) -> NoReturn:
    raise SystemExit(143)


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Logs.  [default: the cache]")
@click.option("--prompts", default=PROMPTS, show_default=True, help="Prompts of each topology.")
@click.option("--aborts", "abort", default=ABORTS, show_default=True, help="Aborted requests.")
@click.option("--times", default=TIMES, show_default=True, help="How often each fault is tried.")
def main(out: Path | None, prompts: int, abort: int, times: int) -> None:
    """Run, print the last line."""
    signal.signal(signal.SIGTERM, _terminated)
    begun = time.monotonic()
    try:
        environment = ensure()
        folder = out or cache_dir() / "vllm"
        click.echo(f"vllm: logs are in {folder}")
        found = asyncio.run(play(environment, folder, prompts, abort, times))
    except EnginesError as error:
        click.echo(f"vllm: {error}", err=True)
        sys.exit(1)
    fine = found["right"] == found["asked"] and found["recovered"] == found["faults"]
    fine = fine and not (found["hung"] or found["leftovers"] or found["wrong"])
    click.echo(f"vllm: {time.monotonic() - begun:.0f} s in this run")
    click.echo(
        f"vllm {'ok' if fine else 'failed'}: tokens={found['right']}/{found['asked']} aborts={found['aborts']} "
        f"hung={found['hung']} leftovers={found['leftovers']} wrong={found['wrong']} "
        f"recovered={found['recovered']}/{found['faults']}"
    )
    sys.exit(not fine)


if __name__ == "__main__":
    main()
