"""`make run` refuses a cluster on which the operator would not work."""

import base64
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from dev.run_operator import INSTALL_CRDS, NotRunnableError, check, environment, keep_seeds


def kubeconfig(folder: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "kubeconfig"
    context = {"name": "here", "context": {"cluster": "here", "user": "me"}}
    cluster = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{port}"}}
    user = {"name": "me", "user": {"token": "none"}}
    path.write_text(
        yaml.safe_dump({"current-context": "here", "contexts": [context], "clusters": [cluster], "users": [user]})
    )
    monkeypatch.setenv("KUBECONFIG", str(path))


async def answered(handler: object, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    app = web.Application()
    app.router.add_get("/{path:.*}", handler)  # type: ignore[arg-type]
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        kubeconfig(folder, runner.addresses[0][1], monkeypatch)
        return await check("default")
    finally:
        await runner.cleanup()


async def test_missing_crd_names_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"reason": "NotFound", "message": "not found"}, status=404)

    with pytest.raises(NotRunnableError, match=f"PrefillPool is not installed; run {INSTALL_CRDS}"):
        await answered(handler, tmp_path, monkeypatch)


async def test_served_kinds_give_seeds_of_chart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def handler(request: web.Request) -> web.Response:
        if request.path.endswith("/secrets/pdpool-seed"):
            return web.json_response({"data": {"seed": base64.b64encode(b"s" * 48).decode()}})
        return web.json_response({"items": [], "metadata": {}})

    assert await answered(handler, tmp_path, monkeypatch) == {"seed": b"s" * 48}


async def test_unreachable_cluster_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubeconfig(tmp_path, 1, monkeypatch)
    with pytest.raises(NotRunnableError, match="does not answer"):
        await check("default")


async def test_missing_kubeconfig_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(NotRunnableError, match="no usable kubeconfig"):
        await check("default")


def test_own_seed_is_kept_private(tmp_path: Path) -> None:
    folder = tmp_path / "seeds"
    keep_seeds(folder, {})
    first = (folder / "seed").read_bytes()
    keep_seeds(folder, {})
    assert (folder / "seed").read_bytes() == first
    assert folder.stat().st_mode & 0o077 == 0


def test_seeds_of_chart_replace_all_others(tmp_path: Path) -> None:
    keep_seeds(tmp_path, {"seed": b"a", "seed-2": b"b"})
    keep_seeds(tmp_path, {"seed": b"c"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"seed": b"c"}


def test_set_variable_keeps_its_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDPOOL_ENGINE_IMAGE", "mine")
    env = environment(tmp_path, namespace="a", lease="b", listen="127.0.0.1:1", watch="", tag="t")
    assert (env["PDPOOL_ENGINE_IMAGE"], env["PDPOOL_NAMESPACE"]) == ("mine", "a")
