"""Builds the Go modules into the cache, only those with changed inputs."""

import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from dev.paths import cache_dir
from dev.shell import exclusively
from dev.tools.modules import MODULES, Module

OLDEST_GO = (1, 24)
REPORT_EVERY_S = 15.0


class BuildError(RuntimeError):
    """A tool cannot be built. The message names it and says what to do."""


@cache
def go_version() -> str:
    """Return the version of the installed Go compiler, for example `go1.26.1`.

    Raises:
        BuildError: there is no compiler, or it is older than `OLDEST_GO`.
    """
    try:
        out = subprocess.run(["go", "env", "GOVERSION"], check=True, capture_output=True, text=True, env=_environment())
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"cannot run `go`: {error}; install Go {OLDEST_GO[0]}.{OLDEST_GO[1]} or newer") from error
    version = out.stdout.strip()
    major, minor = version.removeprefix("go").split("-")[0].split(".")[:2]
    if (int(major), int(minor)) < OLDEST_GO:
        raise BuildError(f"Go is {version}; {OLDEST_GO[0]}.{OLDEST_GO[1]} or newer is needed")
    return version


def destination(module: Module) -> Path:
    """Return the cache folder of the module's binaries. Its name is a hash of all inputs."""
    digest = hashlib.sha256(repr((go_version(), _arguments(module))).encode())
    sources = (p for p in module.folder.iterdir() if p.suffix in {".go", ".mod", ".sum"})
    for source in sorted(sources):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return cache_dir() / "tools" / f"{module.name}-{digest.hexdigest()[:16]}"


def module_of(name: str) -> Module:
    """Return the module that gives a binary, for example `kubectl`.

    Raises:
        BuildError: none does.
    """
    for module in MODULES:
        if name in module.binaries:
            return module
    raise BuildError(f"no module under dev/tools gives a binary {name!r}; they give {', '.join(_all_binaries())}")


def binary(name: str) -> Path:
    """Return the path of one built binary.

    Raises:
        BuildError: no module gives that binary, or it has not been built yet.
    """
    path = destination(module_of(name)) / "bin" / name
    if not path.exists():
        raise BuildError(f"{name} is not built yet; run `python -m dev.tools build`")
    return path


def build(modules: Sequence[Module] = MODULES) -> None:
    """Build the modules that are missing in the cache, and print progress.

    Raises:
        BuildError: a build failed. The compiler's output is part of the message.
    """
    if all(destination(module).exists() for module in modules):
        return
    version = go_version()
    with exclusively(cache_dir() / "tools/.lock", "building tools"):
        missing = [module for module in modules if not destination(module).exists()]
        print(f"tools: {len(missing)} of {len(modules)} Go modules are to be built into {cache_dir() / 'tools'}")
        for number, module in enumerate(missing, start=1):
            label = f"tools: [{number}/{len(missing)}] {module.name}"
            print(f"{label}: building {', '.join(module.binaries)} with {version}", flush=True)
            _build(module, label)


def _all_binaries() -> list[str]:
    return [name for module in MODULES for name in module.binaries]


def _build(module: Module, label: str) -> None:
    final = destination(module)
    started = time.monotonic()
    partial = final.with_name(f".partial-{final.name}")
    shutil.rmtree(partial, ignore_errors=True)
    output = partial / "bin"
    output.mkdir(parents=True)
    # With several packages the target must be a folder. With one package it is the file name.
    target = f"{output}/" if len(module.binaries) > 1 else str(output / next(iter(module.binaries)))
    packages = list(module.binaries.values())
    total = _count_packages(module, packages)
    command = ["nice", "-n", "10", "go", "build", "-v", "-o", target, *_arguments(module), *packages]
    # The output has one line per compiled package, then errors.
    lines: list[str] = []
    reported = started
    with subprocess.Popen(
        command, cwd=module.folder, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if time.monotonic() - reported >= REPORT_EVERY_S:
                reported = time.monotonic()
                print(f"{label}: {len(lines)} of {total} packages, {reported - started:.0f} s", flush=True)
    if process.returncode:
        raise BuildError(f"{module.name}: go build failed ({process.returncode}):\n{''.join(lines[-30:])}")
    partial.rename(final)
    print(f"{label}: done in {time.monotonic() - started:.0f} s", flush=True)


def _count_packages(module: Module, packages: list[str]) -> int:
    command = ["go", "list", "-deps", *packages]
    result = subprocess.run(command, cwd=module.folder, env=_environment(), capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{module.name}: cannot resolve its packages:\n{result.stderr[-2000:]}")
    return len(result.stdout.splitlines())


def _arguments(module: Module) -> list[str]:
    linker = ["-s", "-w", *(f"-X={name}={value}" for name, value in module.variables.items())]
    return ["-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags", " ".join(linker)]


def _environment() -> dict[str, str]:
    # Use only the installed toolchain. Go must not download another compiler unnoticed.
    return os.environ | {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "", "GOWORK": "off"}
