"""The chart is upgraded, uninstalled and installed again under traffic. Running pods keep serving."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dev.shell import run, wait_for
from dev.tools.build import binary
from tests.cluster.stack import CHART, CRDS, OPERATOR, SYSTEM, Stack
from tests.cluster.stack_traffic import Traffic

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300, func_only=True),
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs KUBECONFIG of a cluster: make cluster"),
]

IMAGES = ("operator", "engine", "router")


@pytest.fixture
def next_tag(serving: Stack) -> Iterator[str]:
    """A second tag of the images on both nodes. The operator sees it as a new version."""
    names = {f"localhost/pdpool-{image}:dev": f"localhost/pdpool-{image}:next" for image in IMAGES}
    for node in serving.nodes:
        for old, new in names.items():
            serving.ctr(node, "images", "tag", "--force", old, new)
    yield "next"
    serving.install()
    for node in serving.nodes:
        serving.ctr(node, "images", "rm", *names.values())


def operator_container(stack: Stack) -> dict:
    (container,) = stack.get("deployment", OPERATOR, within=SYSTEM)["spec"]["template"]["spec"]["containers"]
    return container


def test_an_upgrade_to_new_images_fails_no_request_and_replaces_no_pod_by_itself(serving: Stack, expected, next_tag):
    before = serving.uids()
    with Traffic(serving.router_url(), expected) as traffic:
        serving.install(image={"registry": "localhost", "tag": next_tag}, operator={"logLevel": "debug"})
        container = operator_container(serving)
        env = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert container["image"] == f"localhost/pdpool-operator:{next_tag}"
        assert env["PDPOOL_LOG_LEVEL"] == "debug"
        for kind, pods in (("ppool", "chat-prefill-0"), ("dpool", "chat-decode-0, chat-decode-1"), ("pdsvc", "router")):
            told = serving.until(kind, "Ready", status="True", reason="UpdateAvailable")
            assert pods in told["message"]
            assert "pdpool.dev/restarted-at" in told["message"]
        traffic.more()
    assert traffic.errors == []
    assert serving.uids() == before
    serving.install()
    for kind in ("ppool", "dpool", "pdsvc"):
        serving.until(kind, "Ready", status="True", reason="Ready")
    assert serving.uids() == before


def test_an_upgrade_changes_the_crds(serving: Stack, tmp_path: Path):
    chart = tmp_path / "pdpool"
    shutil.copytree(CHART, chart)
    path = chart / "files" / "crds" / f"pdpool.dev_{CRDS[1].partition('.')[0]}.yaml"
    crd = yaml.safe_load(path.read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    schema["newField"] = {"type": "string", "maxLength": 16}
    path.write_text(yaml.safe_dump(crd, sort_keys=False))

    def fields() -> dict:
        (version,) = serving.get("crd", CRDS[1])["spec"]["versions"]
        return version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]

    assert "newField" not in fields()
    before = serving.uids()
    serving.install(chart)
    assert fields()["newField"] == {"type": "string", "maxLength": 16}
    # The API server publishes the new schema a moment after it has stored it.
    patch = (
        "patch",
        "dpool",
        "chat",
        "-n",
        "stack-pools",
        "--type=merge",
        "-p",
        json.dumps({"spec": {"newField": "x"}}),
    )

    def kept() -> str | None:
        run(binary("kubectl"), *patch)
        return None if serving.get("dpool", "chat")["spec"].get("newField") == "x" else "newField was pruned"

    wait_for("the new field to be kept", kept, deadline_s=60)
    serving.install()
    assert "newField" not in fields()
    serving.settle()
    assert serving.uids() == before


def test_an_uninstall_leaves_crds_and_pools_serving_and_the_next_installation_takes_them_over(serving: Stack, expected):
    before, key = serving.uids(), serving.router_key()
    with Traffic(serving.router_url(), expected) as traffic:
        serving.uninstall()
        assert serving.kubectl("get", "crd", *CRDS, "-o", "name").split()
        traffic.more()
        serving.install()
        # Ready is older than the new operator. A status for a newer generation shows that the new operator leads.
        serving.patch("pdsvc", {"stuckAfterSeconds": 31})
        serving.settle()
        traffic.more()
    assert traffic.errors == []
    assert serving.uids() == before
    assert serving.router_key() == key
    serving.until_listed(1)
