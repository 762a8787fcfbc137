"""`python -m dev.images model | build | load | push`."""

import sys
from functools import partial
from pathlib import Path

import click

from dev import packages
from dev.cluster import host
from dev.cluster.layout import state_at
from dev.images.build import IMAGES, PRODUCT_IMAGES, build
from dev.images.load import load, push
from dev.images.model import prepare_model
from dev.shell import Clock, CommandError
from dev.tools.build import BuildError

NAMES = click.argument("names", nargs=-1, type=click.Choice(sorted(IMAGES)))


@click.group()
def main() -> None:
    """Container images; NAMES default to the product's: operator, engine, router."""


@main.command("build")
@NAMES
def build_command(names: tuple[str, ...]) -> None:
    """Build images; unchanged layers are reused."""
    clock = Clock("images")
    packages.ensure(clock)
    for name in names or PRODUCT_IMAGES:
        build(name, clock)


@main.command("model")
def model_command() -> None:
    """Put the converted model where the engine's Dockerfile expects it."""
    prepare_model(Clock("images"))


@main.command("load")
@click.option("--built", is_flag=True, help="Skip the build: the images are up to date.")
@NAMES
def load_command(built: bool, names: tuple[str, ...]) -> None:
    """Build images and load them into the nodes of the local cluster."""
    clock = Clock("images")
    packages.ensure(clock)
    record = host.read_record()
    if record is None:
        raise RuntimeError("there is no local cluster; `make cluster` makes one")
    state = state_at(Path(record.state))
    for name in names or PRODUCT_IMAGES:
        if not built:
            build(name, clock)
        load(name, state, clock)


@main.command("push")
@click.option("--registry", required=True, help="For example 127.0.0.1:5001/pdpool; images become REGISTRY/NAME:TAG.")
@click.option("--tag", default="dev", show_default=True)
@NAMES
def push_command(registry: str, tag: str, names: tuple[str, ...]) -> None:
    """Push built images to your registry."""
    clock = Clock("images")
    for name in names or PRODUCT_IMAGES:
        reference = f"{registry}/{IMAGES[name].tag.split('/')[-1].split(':')[0]}:{tag}"
        with clock.ticking(partial("pushing {}".format, reference)):
            digest = push(name, reference)
        clock.say(f"pushed {reference} ({digest})")


try:
    main()
except (BuildError, CommandError, OSError, RuntimeError, ValueError) as error:
    sys.exit(f"images: {error}")
