"""Records the interfaces of the packages behind `mori` and `ascend`, for their contract tests.

`python -m dev.engine_interfaces WHEEL...` takes wheels (`pip download --no-deps amd-mori memfabric-hybrid`), installs
nothing, and writes tests/unit/engines/recorded/<package>.json.

MORI's compiled module needs ROCm to be loaded, so only its names are recorded. For MORI's Python layer and for
memfabric's module, which can be loaded everywhere, the parameters of all methods are recorded.
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

RECORDED = CHECKOUT / "tests/unit/engines/recorded"
BOUND = re.compile(rb"(?<=\0)[A-Za-z_][A-Za-z0-9_]+(?=\0)")
"""Form of a name that pybind11 leaves in a compiled module."""
MORI_NAMES = {
    *("IOEngineConfig", "host", "port"),
    *("BackendType", "RDMA", "RdmaBackendConfig", "poll_cq_mode", "enable_notification", "PollCqMode", "EVENT"),
    *("EngineDesc", "key", "pack", "unpack", "MemoryDesc", "engine_key", "data", "size"),
    *("MemoryLocationType", "CPU", "GPU", "TransferStatus", "Succeeded", "Failed", "Message"),
}
"""Names of the compiled module that our adapter uses."""
DUMP = """
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
    with tempfile.TemporaryDirectory() as folder:
        wheel.extractall(folder)
        environment = {"PYTHONPATH": folder, "PATH": "/usr/bin:/bin"}
        done = subprocess.run([sys.executable, "-c", DUMP], env=environment, capture_output=True, text=True, check=True)
    recorded: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return recorded


@click.command()
@click.argument("wheels", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
def main(wheels: tuple[Path, ...]) -> None:
    """Record the interfaces of wheels of amd-mori and memfabric-hybrid."""
    for path in wheels:
        package, version = path.name.split("-")[:2]
        read = {"amd_mori": mori, "memfabric_hybrid": memfabric}[package]
        with zipfile.ZipFile(path) as wheel:
            record = {"package": package, "version": version, **read(wheel)}
        (RECORDED / f"{package}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        click.echo(f"recorded {package} {version}")


if __name__ == "__main__":
    main()
