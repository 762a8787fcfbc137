"""Record the interfaces of the packages behind transfer backends, for the contract tests of their stand-ins.

`python -m dev.backend_interfaces WHEEL...` takes wheels (`pip download --no-deps nixl-cu12 amd-mori memfabric-hybrid`),
installs nothing, and writes tests/unit/backends/recorded/<package>.json. MORI's compiled module needs ROCm to be
loaded, so only names of it are recorded. Of its Python layer and of the other modules all parameters are.
"""

import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import click

from dev.paths import CHECKOUT

RECORDED = CHECKOUT / "tests/unit/backends/recorded"
BOUND = re.compile(rb"(?<=\0)[A-Za-z_][A-Za-z0-9_]+(?=\0)")
"""What pybind11 keeps of a name in a compiled module."""
MORI_NAMES = {
    *("IOEngineConfig", "host", "port"),
    *("BackendType", "RDMA", "RdmaBackendConfig", "poll_cq_mode", "enable_notification", "PollCqMode", "EVENT"),
    *("EngineDesc", "key", "pack", "unpack", "MemoryDesc", "engine_key", "data", "size"),
    *("MemoryLocationType", "CPU", "GPU", "TransferStatus", "Succeeded", "Failed", "Message"),
}
"""What our backend uses of the compiled module."""
MEMFABRIC = """
import json, re, memfabric_hybrid as module
def parameters(function):
    line = (function.__doc__ or "").strip().split("\\n")[0]
    return [name for name in re.findall(r"[(,] ?(\\w+):", line) if name != "self"]
engine = module.TransferEngine
print("\\n" + json.dumps({
    "TransferEngine": {n: parameters(getattr(engine, n)) for n in dir(engine) if n[0] != "_" and n[:5] != "Trans"},
    "TransDataOpType": sorted(n for n in dir(module.TransDataOpType) if n.isupper()),
    "functions": sorted(n for n in dir(module) if n[0] != "_"),
}))
"""
NIXL = """
import json, re, nixl_cu12._bindings as module
def parameters(function):
    calls = re.findall(r"^(?:\\d+\\. )?\\w+\\((.*)\\) ->", function.__doc__ or "", re.M)
    return [[name for name in re.findall(r"(?:^|, )(\\w+):", call) if name != "self"] for call in calls]
print("\\n" + json.dumps({
    "nixlAgent": {n: parameters(getattr(module.nixlAgent, n)) for n in dir(module.nixlAgent) if n[0] != "_"},
    "functions": sorted(n for n in dir(module) if n[0] != "_"),
}))
"""


def mori(wheel: zipfile.ZipFile) -> dict[str, Any]:
    classes = [node for node in ast.parse(wheel.read("mori/io/engine.py")).body if isinstance(node, ast.ClassDef)]
    methods = {
        node.name: {
            method.name: [argument.arg for argument in method.args.args[1:]]
            for method in node.body
            if isinstance(method, ast.FunctionDef)
        }
        for node in classes
    }
    bound = {name.decode() for name in BOUND.findall(wheel.read("mori/libmori_pybinds.so"))}
    if missing := MORI_NAMES - bound:
        message = f"the compiled module does not bind {', '.join(sorted(missing))}"
        raise click.ClickException(message)
    return {"classes": methods, "bound": sorted(MORI_NAMES)}


def memfabric(wheel: zipfile.ZipFile) -> dict[str, Any]:
    return dumped(wheel, MEMFABRIC)


def nixl(wheel: zipfile.ZipFile) -> dict[str, Any]:
    return dumped(wheel, NIXL)


def dumped(wheel: zipfile.ZipFile, script: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        wheel.extractall(folder)
        environment = {"PYTHONPATH": folder, "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
    recorded: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return recorded


@click.command()
@click.argument("wheels", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
def main(wheels: tuple[Path, ...]) -> None:
    """Record the interfaces of wheels of nixl-cu12, amd-mori and memfabric-hybrid."""
    for path in wheels:
        package, version = path.name.split("-")[:2]
        read = {"nixl_cu12": nixl, "amd_mori": mori, "memfabric_hybrid": memfabric}[package]
        with zipfile.ZipFile(path) as wheel:
            record = {"package": package, "version": version, **read(wheel)}
        (RECORDED / f"{package}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        click.echo(f"recorded {package} {version}")


if __name__ == "__main__":
    main()
