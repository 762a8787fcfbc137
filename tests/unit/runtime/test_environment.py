"""The configuration from the variables that pdpool's pods set."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from pdpool_connector import ConnectorConfig, engine_variables

HOST = {"PDPOOL_POD_IP": "10.0.0.1"}


def test_each_variable_sets_its_field(tmp_path) -> None:
    key = tmp_path / "operator.pem"
    key.write_bytes(
        Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    config = ConnectorConfig.from_env(
        {
            "PDPOOL_ADVERTISE_HOST": "pod-0.engines",
            "PDPOOL_POD_IP": "10.0.0.1",
            "PDPOOL_CONTROL_PORT": "8999",
            "PDPOOL_ADMIN_PORT": "9400",
            "PDPOOL_BOOTSTRAP_PORT": "0",
            "PDPOOL_TRANSFER_BACKEND": "nixl",
            "PDPOOL_CURVE_REQUIRED": "False",
            "PDPOOL_POD_UID": "uid",
            "PDPOOL_OPERATOR_KEY": str(key),
            "PDPOOL_FLIGHT_DIR": "/run/pdpool/flights",
            "PDPOOL_ADMIN_SOCKET": "/run/pdpool/admin.sock",
        }
    )
    assert (config.advertise_host, config.control_port, config.admin_port) == ("pod-0.engines", 8999, 9400)
    assert (config.bootstrap_port, config.backend, config.curve_required) == (0, "nixl", False)
    assert (config.pod_uid, config.flight_dir) == ("uid", Path("/run/pdpool/flights"))
    assert config.admin_socket == Path("/run/pdpool/admin.sock")
    assert config.admin_gate is not None


def test_pod_ip_is_the_host_otherwise() -> None:
    config = ConnectorConfig.from_env({**HOST, "PDPOOL_CONTROL_PORT": ""})
    assert (config.advertise_host, config.control_port, config.admin_port) == ("10.0.0.1", 0, None)


def test_arguments_win_over_variables() -> None:
    config = ConnectorConfig.from_env({**HOST, "PDPOOL_CONTROL_PORT": "no port"}, control_port=5, advertise_host="::1")
    assert (config.advertise_host, config.control_port) == ("::1", 5)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PDPOOL_POD_IP": ""}, "PDPOOL_ADVERTISE_HOST and PDPOOL_POD_IP are not set: give one of them"),
        ({"PDPOOL_CONTROL_PORT": "70000"}, "PDPOOL_CONTROL_PORT='70000': give a TCP port"),
        ({"PDPOOL_ADMIN_PORT": "-1"}, "PDPOOL_ADMIN_PORT='-1': give a TCP port"),
        ({"PDPOOL_TRANSFER_BACKEND": "tcp"}, "PDPOOL_TRANSFER_BACKEND='tcp': give one of nixl"),
        ({"PDPOOL_CURVE_REQUIRED": "maybe"}, "PDPOOL_CURVE_REQUIRED='maybe': give true or false"),
        ({"PDPOOL_CURVE_KEYS": "/nowhere"}, "PDPOOL_CURVE_KEYS='/nowhere': /nowhere cannot be read"),
        ({"PDPOOL_OPERATOR_KEY": "/nowhere"}, "PDPOOL_POD_UID is not set: PDPOOL_OPERATOR_KEY='/nowhere' needs"),
        (
            {"PDPOOL_OPERATOR_KEY": "/nowhere", "PDPOOL_POD_UID": "uid"},
            "PDPOOL_OPERATOR_KEY='/nowhere': give a file with the operator's public key",
        ),
        ({"PDPOOL_POD_IP": "1.2.3.4:80"}, "advertise_host='1.2.3.4:80' is no host"),
    ],
)
def test_wrong_variable_is_refused_by_name(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConnectorConfig.from_env({**HOST, **variables})


def test_connectors_of_a_pod_have_ports_and_sockets_of_their_own() -> None:
    pod = {"PDPOOL_CONTROL_PORT": "9300", "PDPOOL_ADMIN_PORT": "9400", "PDPOOL_ADMIN_SOCKET": "/a", **HOST}
    ranks = [ConnectorConfig.from_env(engine_variables(pod, host="::1", pod_rank=rank)) for rank in (0, 2)]
    assert [(one.control_port, one.admin_port) for one in ranks] == [(9300, 9400), (9302, 9402)]
    assert [str(one.admin_socket) for one in ranks] == ["/a", "/a.2"]


@pytest.mark.parametrize("text", ["0", "", "x"])
def test_port_that_is_any_stays_so(text: str) -> None:
    assert engine_variables({"PDPOOL_ADMIN_PORT": text}, host="::1", pod_rank=3)["PDPOOL_ADMIN_PORT"] == text


@pytest.mark.parametrize(("named", "backend"), [("", "nixl"), ("mooncake", "mooncake")])
def test_engine_has_a_backend_for_its_own_memory(named: str, backend: str) -> None:
    variables = engine_variables({"PDPOOL_TRANSFER_BACKEND": named}, host="10.0.0.2", pod_rank=0)
    config = ConnectorConfig.from_env(variables)
    assert (config.backend, config.advertise_host) == (backend, "10.0.0.2")
