"""What /proc, /sys and /dev say of a machine, from trees laid out as the kernel does."""

from pathlib import Path

import pytest
from pdpool_connector.hwcheck.machine import ZERO_GID, look


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


PORT = "sys/class/infiniband/mlx5_0/ports/1"
MACHINE = {
    "proc/driver/nvidia/gpus/0000:17:00.0/information": "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 211",
    f"{PORT}/state": "4: ACTIVE",
    f"{PORT}/link_layer": "Ethernet",
    f"{PORT}/gids/0": "fe80:0000:0000:0000:0a98:03ff:fe6b:0001",
    f"{PORT}/gids/3": "0000:0000:0000:0000:0000:ffff:0a00:0001",
    f"{PORT}/gids/4": ZERO_GID,
    f"{PORT}/gid_attrs/types/3": "RoCE v2",
    "dev/infiniband/uverbs0": "",
}


def test_gpus_are_named_by_model(tmp_path):
    assert look(write(tmp_path, MACHINE)).gpus == ("NVIDIA H100 80GB HBM3",)


def test_unused_gids_are_left_out(tmp_path):
    (port,) = look(write(tmp_path, MACHINE)).rdma
    assert (port.device, port.port, port.active, port.link_layer) == ("mlx5_0", 1, True, "Ethernet")
    assert [(index, kind) for index, _, kind in port.gids] == [(0, ""), (3, "RoCE v2")]


def test_active_port_with_device_is_ready(tmp_path):
    assert look(write(tmp_path, MACHINE)).rdma_ready


@pytest.mark.parametrize("lacking", ["dev/infiniband/uverbs0", f"{PORT}/state"])
def test_port_without_device_or_link_is_not_ready(tmp_path, lacking):
    root = write(tmp_path, MACHINE)
    (root / lacking).unlink()
    assert not look(root).rdma_ready


def test_bare_machine_has_nothing(tmp_path):
    found = look(tmp_path)
    assert (found.gpus, found.rdma, found.verbs_devices, found.shm_bytes) == ((), (), (), 0)
