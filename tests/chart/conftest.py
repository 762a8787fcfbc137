import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dev.paths import CHECKOUT
from dev.prometheus.promtool import promtool as find_promtool
from dev.tools.build import binary

CHART = CHECKOUT / "charts" / "pdpool"
Render = Callable[..., "Rendered"]


class Strict(yaml.SafeLoader):
    """Rejects a duplicate key in a map, which Kubernetes rejects and PyYAML accepts."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        assert not twice, f"{twice} stand twice {node.start_mark}"
        return super().construct_mapping(node, deep)


class Rendered:
    """Output of `helm template`: objects by kind and name, or its error."""

    def __init__(self, result: subprocess.CompletedProcess[str]) -> None:
        self.failed = result.returncode != 0
        self.error = result.stderr
        self.objects: list[dict[str, Any]] = []
        if not self.failed:
            self.objects = [document for document in yaml.load_all(result.stdout, Loader=Strict) if document]

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [document for document in self.objects if document["kind"] == kind]

    def one(self, kind: str, name: str, namespace: str | None = None) -> dict[str, Any]:
        assert not self.failed, self.error
        matches = [
            document
            for document in self.all(kind)
            if document["metadata"]["name"] == name and namespace in (None, document["metadata"].get("namespace"))
        ]
        assert len(matches) == 1, f"{kind} {name}: {len(matches)} of {[d['metadata']['name'] for d in self.all(kind)]}"
        return matches[0]


@pytest.fixture(scope="session")
def helm() -> Path:
    return Path(os.environ["HELM"]) if "HELM" in os.environ else binary("helm")


@pytest.fixture(scope="session")
def promtool() -> Path:
    return find_promtool()


@pytest.fixture(scope="session")
def render(helm: Path) -> Render:
    def run(
        values: dict[str, Any] | None = None,
        *,
        api_versions: str = "",
        release: str = "pdpool",
        namespace: str = "pdpool-system",
    ) -> Rendered:
        command = [str(helm), "template", release, str(CHART), "--namespace", namespace, "--values", "-"]
        if api_versions:
            command += ["--api-versions", api_versions]
        text = yaml.safe_dump(values or {})
        return Rendered(subprocess.run(command, input=text, capture_output=True, text=True, timeout=240, check=False))

    return run


@pytest.fixture(scope="session")
def default(render: Render) -> Rendered:
    return render()


@pytest.fixture(scope="session")
def rules(render: Render) -> str:
    text = render().one("ConfigMap", "pdpool-rules")["data"]["pdpool.rules.yaml"]
    assert isinstance(text, str)
    return text
