"""Build images with buildah from their Dockerfiles."""

import configparser
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dev import packages
from dev.images import real_engines, store
from dev.images.base import base_image
from dev.images.model import prepare_model
from dev.paths import CHECKOUT
from dev.shell import Clock, exclusively
from dev.tools.build import binary

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Image:
    """How one image is built.

    Attributes:
        name: Short name.
        tag: Name in the local storage and on the nodes.
        dockerfile: An ordinary Dockerfile.
        context: Returns the folder of its COPY lines.
        needs_base: Whether it uses the base image.
        prepare: Makes files for the context.
    """

    name: str
    tag: str
    dockerfile: Path
    context: Callable[[], Path]
    needs_base: bool = False
    prepare: Callable[[Clock], None] = lambda _clock: None


def _product(name: str, prepare: Callable[[Clock], None] = lambda _clock: None) -> Image:
    dockerfile = CHECKOUT / "images" / name / "Dockerfile"
    return Image(name, f"localhost/pdpool-{name}:dev", dockerfile, lambda: CHECKOUT, needs_base=True, prepare=prepare)


def _real_engine(name: str) -> Image:
    dockerfile, tag = HERE / name / "Dockerfile", f"localhost/pdpool-{name}:dev"
    return Image(name, tag, dockerfile, real_engines.context, needs_base=True, prepare=real_engines.prepare)


IMAGES = {
    image.name: image
    for image in (
        Image("pause", "localhost/pause:1", HERE / "pause/Dockerfile", lambda: binary("pause").parent),
        Image("coredns", "localhost/coredns:1", HERE / "coredns/Dockerfile", lambda: binary("coredns").parent),
        Image(
            "prometheus",
            "localhost/prometheus:1",
            HERE / "prometheus/Dockerfile",
            lambda: packages.unpacked("prometheus"),
            needs_base=True,
        ),
        _product("operator"),
        _product("engine", prepare_model),
        _product("router"),
        _real_engine("sglang"),
        _real_engine("vllm"),
    )
}
# Option of pip -> environment variable that sets it.
PIP_SETTINGS = {
    "index-url": "PIP_INDEX_URL",
    "extra-index-url": "PIP_EXTRA_INDEX_URL",
    "trusted-host": "PIP_TRUSTED_HOST",
    "cert": "PIP_CERT",
    "proxy": "PIP_PROXY",
}
PRODUCT_IMAGES = ("operator", "engine", "router")


def build(name: str, clock: Clock) -> None:
    """Build one image of `IMAGES`. Unchanged layers are reused.

    Raises:
        CommandError: the build failed. Its output is part of the message.
    """
    with exclusively(store.folder() / ".lock", "building images"):
        _build(IMAGES[name], clock)


def _build(image: Image, clock: Clock) -> None:
    image.prepare(clock)
    clock.say(f"building {image.tag}")
    started = clock.elapsed_s
    arguments: list[str | Path] = ["bud", "--isolation", "chroot", "--network", "host", "--layers"]
    arguments += ["--tag", image.tag, "--file", image.dockerfile]
    if image.needs_base:
        arguments += ["--build-arg", f"BASE={base_image(clock)}", *_pip_settings()]
    with clock.ticking(lambda: f"buildah is at {image.tag}"):
        store.buildah(*arguments, image.context())
    clock.say(f"built {image.tag} in {clock.elapsed_s - started:.1f} s")


def _pip_settings() -> list[str | Path]:
    """Pass this machine's package index and authorities to pip in the build. The image does not contain them."""
    configured = configparser.ConfigParser(interpolation=None)
    configured.read("/etc/pip.conf")
    settings = dict(configured["global"]) if configured.has_section("global") else {}
    settings |= {key: os.environ[name] for key, name in PIP_SETTINGS.items() if os.environ.get(name)}
    if not settings:
        return []
    path = store.folder() / "pip.conf"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()))
    volumes: list[str | Path] = ["--volume", f"{path}:/etc/pip.conf:ro"]
    if "cert" in settings:
        certificates = Path(settings["cert"]).parent
        volumes += ["--volume", f"{certificates}:{certificates}:ro"]
    return volumes
