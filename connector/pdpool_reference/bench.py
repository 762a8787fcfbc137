"""`python -m pdpool_reference.bench [MODEL]`: what one engine computes a second on this machine.

One thread computes, so that tokens per second of CPU time are what an idle core would give, even on a busy machine.
"""

import sys
import time
from collections.abc import Sequence
from statistics import median

import click
import numpy as np
from threadpoolctl import threadpool_info  # type: ignore[import-untyped]

from pdpool_reference import weights, weights_fetch
from pdpool_reference.kv import PAGE_TOKENS, PagedKV
from pdpool_reference.model import Model, Step

CONTEXT = 512
"""Tokens before each measured decode step."""


@click.command()
@click.argument("model_path", metavar="[MODEL]", required=False)
@click.option("--repeats", type=click.IntRange(1, 100), default=5, show_default=True, help="Median of so many.")
def main(model_path: str | None, repeats: int) -> None:
    """Measure MODEL: a model directory, `tiny`, or by default SmolLM2 from the user's cache."""
    try:
        directory = model_path or str(weights_fetch.smollm2_dir(lambda line: click.echo(line, err=True)))
        start = time.perf_counter()
        config, loaded = weights.open_model(directory)
    except weights.WeightsError as error:
        sys.exit(f"error: {error}")
    pages = CONTEXT // PAGE_TOKENS + 1
    model = Model(config, loaded, PagedKV(config, 8 * pages))
    tables = np.arange(8 * pages, dtype=np.int32).reshape(8, pages)
    prompt = np.random.default_rng(0).integers(0, config.vocab, CONTEXT, np.int32)
    model.forward([Step(prompt[:1], 0, tables[0])])
    click.echo(f"{config.name} on {_kernels()}; load and first token: {time.perf_counter() - start:.2f} s")
    click.echo(f"{'median':28}{'ms':>10}{'ms CPU':>10}{'tokens/s CPU':>14}")
    for count in (16, 64, 256, CONTEXT):
        _measure(f"prefill {count} tokens", model, [Step(prompt[:count], 0, tables[0])], repeats)
    for table in tables[1:]:
        model.forward([Step(prompt, 0, table)])
    for batch in (1, 4, 8):
        steps = [Step(prompt[:1], CONTEXT, table) for table in tables[:batch]]
        _measure(f"decode batch {batch}, context {CONTEXT}", model, steps, repeats)


def _measure(what: str, model: Model, steps: Sequence[Step], repeats: int) -> None:
    wall, cpu = [], []
    for _ in range(repeats):
        wall_start, cpu_start = time.perf_counter(), time.thread_time()
        model.forward(steps)
        wall.append(time.perf_counter() - wall_start)
        cpu.append(time.thread_time() - cpu_start)
    tokens = sum(len(step.tokens) for step in steps)
    click.echo(f"{what:28}{1e3 * median(wall):10.1f}{1e3 * median(cpu):10.1f}{tokens / median(cpu):14.1f}")


def _kernels() -> str:
    return ", ".join(
        f"{library['internal_api']} {library['version']} ({library.get('architecture', 'unknown')}), 1 thread"
        for library in threadpool_info()
        if library["user_api"] == "blas"
    )


if __name__ == "__main__":
    main()
