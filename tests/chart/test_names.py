"""Names that YAML would parse as numbers, booleans or null, and names that Kubernetes accepts only for some kinds."""

from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import Render

NAMES = {"name", "namespace", "secretName", "serviceAccountName", "priorityClassName", "image", "value"}
MAPS = {"labels", "matchLabels", "annotations", "selector"}


def strings(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield paths and values of every field of an object that Kubernetes requires to be a string."""
    if isinstance(node, list):
        for index, child in enumerate(node):
            yield from strings(child, f"{path}[{index}]")
    if isinstance(node, dict):
        for key, child in node.items():
            here = f"{path}.{key}"
            if key in MAPS and isinstance(child, dict):
                yield from (
                    (f"{here}.{name}", value) for name, value in child.items() if not isinstance(value, (dict, list))
                )
            if key in NAMES:
                yield here, child
            yield from strings(child, here)


@pytest.mark.parametrize("word", ["123", "true", "null", "0x1f"])
def test_names_that_look_like_something_else_stay_strings(render: Render, word: str) -> None:
    values: dict[str, Any] = {
        "fullnameOverride": word if word[0].isalpha() else "pdpool",
        "commonLabels": {"team": word},
        "image": {"registry": "[::1]:5000", "tag": word, "pullSecrets": [word]},
        "watchNamespaces": [word],
        "operator": {"priorityClassName": word, "nodeSelector": {"zone": word}, "podAnnotations": {"on": word}},
        "serviceAccount": {"name": word},
        "seed": {"existingSecret": word},
        "rules": {"configMap": {"namespace": word}, "prometheusRule": {"enabled": True}},
        "metrics": {"podMonitor": {"enabled": True}},
        "test": {"router": {"service": word, "namespace": word}},
    }
    rendered = render(values, api_versions="monitoring.coreos.com/v1", release=word, namespace=word)
    assert not rendered.failed, rendered.error
    objects = [o for o in rendered.objects if o["kind"] != "CustomResourceDefinition"]
    found = [(o["kind"], *entry) for o in objects for entry in strings(o)]
    assert len(found) > 100
    assert [entry for entry in found if not isinstance(entry[2], str)] == []
    engines = next(o for o in rendered.all("PodMonitor") if o["metadata"]["name"].endswith("-engines"))
    assert engines["spec"]["namespaceSelector"]["matchNames"] == [word]


def test_a_release_with_a_dot_in_its_name_makes_services_that_kubernetes_takes(render: Render) -> None:
    (service,) = render(release="team.pdpool").all("Service")
    assert service["metadata"]["name"] == "team-pdpool-operator-metrics"


def test_names_that_no_service_may_have_are_refused(render: Render) -> None:
    for release, values, name in (
        ("1pd", {}, "1pd-pdpool"),
        ("2-pdpool", {}, "2-pdpool"),
        ("7team", {"nameOverride": "x"}, "7team-x"),
    ):
        refused = render(values, release=release)
        assert refused.failed
        assert (
            f"{name} cannot be the name of a Service: it must begin with a letter; use such a release name"
            in refused.error
        )
        assert "set fullnameOverride" in refused.error
        assert not render(values | {"fullnameOverride": "pd"}, release=release).failed
