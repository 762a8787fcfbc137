"""Two real SGLang servers on CPU with this checkout's plugin, for tests that stop their processes."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import aiohttp

CHECKOUT = Path(__file__).parents[2]
START_S, CLIENT_S = 420.0, 120.0
FLAGS = (
    *("--host", "127.0.0.1", "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
    *("--max-total-tokens", "16384", "--max-running-requests", "16", "--page-size", "16"),
    *("--enable-metrics", "--skip-server-warmup", "--sleep-on-idle"),
)
ENVIRON = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "UCX_NET_DEVICES": "lo",
    "UCX_TLS": "tcp,self",  # a writer that is stopped then leaves bytes under way
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Server:
    """One server of a pair: its process group, HTTP port, and admin port."""

    def __init__(self, role, engines, folder, ports, bootstrap, cpu):
        self.role, self.port, self.admin, self.bootstrap = role, *ports, bootstrap
        self.log = folder / f"{role}.log"
        extra = {
            "prefill": ["--disable-overlap-schedule", "--chunked-prefill-size", "128"],
            "decode": ["--disaggregation-decode-retraction-backup", "cpu_tensor"],
        }[role]
        command = ["taskset", "-c", str(cpu), str(engines / "venv/bin/python"), "-m", "sglang.launch_server"]
        command += ["--model-path", str(engines / "models/tiny"), "--served-model-name", "tiny", *FLAGS, *extra]
        command += ["--port", str(self.port), "--disaggregation-mode", role]
        command += ["--disaggregation-transfer-backend", "pdpool", "--disaggregation-bootstrap-port", str(bootstrap)]
        environ = os.environ | ENVIRON | {"PYTHONPATH": f"{folder}:{CHECKOUT / 'connector'}"}
        environ["PDPOOL_ADMIN_PORT"] = str(self.admin)
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command, env=environ, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def schedulers(self):
        """Pids of its scheduler processes."""
        listed = subprocess.run(["ps", "-eo", "pid=,pgid=,args="], capture_output=True, text=True, check=True).stdout
        rows = [line.split(None, 2) for line in listed.splitlines()]
        group = str(self.process.pid)
        return [int(pid) for pid, pgid, name in rows if pgid == group and "sglang::scheduler" in name]

    @contextmanager
    def stopped(self):
        """Its schedulers do nothing for a while."""
        pids = self.schedulers()
        assert pids, self.log.read_text()[-2000:]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def end(self):
        """Kill the process group: nothing of it needs an orderly end."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


def free_ports(count):
    """Ports that nothing listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextmanager
def pair(engines, folder):
    """Start prefill and decode, and wait until both answer."""
    described = folder / "pdpool-0.1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: pdpool\nVersion: 0.1.0\n")
    (described / "entry_points.txt").write_text("[sglang.srt.plugins]\npdpool = pdpool_sglang.plugin:register\n")
    ports = free_ports(5)
    servers = []
    try:
        for number, role in enumerate(("prefill", "decode")):
            own = ports[2 * number : 2 * number + 2]
            servers.append(Server(role, engines, folder, own, ports[4], number % (os.cpu_count() or 1)))
        deadline = time.monotonic() + START_S
        for server in servers:
            while "fired up and ready to roll" not in server.log.read_text():
                assert server.process.poll() is None, server.log.read_text()[-3000:]
                assert time.monotonic() < deadline, server.log.read_text()[-3000:]
                time.sleep(1)
        yield servers
    finally:
        for server in servers:
            server.end()


class Client:
    """Requests to both servers, as a router sends them."""

    def __init__(self, session, prefill, decode):
        self.session, self.prefill, self.decode = session, prefill, decode
        self.random = random.Random(7)

    def prompt(self, tokens):
        """A prompt of so many tokens."""
        return [self.random.randrange(5, 2000) for _ in range(tokens)]

    async def ask(self, server, prompt, room, rid=None):
        """One half of a request: (status, body)."""
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.prefill.bootstrap,
            "bootstrap_room": room,
        } | ({"rid": rid} if rid else {})
        url = f"http://127.0.0.1:{server.port}/generate"
        async with self.session.post(url, json=body) as response:
            return response.status, json.loads(await response.text())

    async def tokens(self, prompt):
        """Both halves; the tokens that decode answered with."""
        room = self.random.getrandbits(60) + 1
        answers = await asyncio.gather(self.ask(self.prefill, prompt, room), self.ask(self.decode, prompt, room))
        assert [status for status, _ in answers] == [200, 200], answers
        return answers[1][1]["output_ids"]

    async def abort(self, server, rid):
        """Have a server give a request up."""
        async with self.session.post(f"http://127.0.0.1:{server.port}/abort_request", json={"rid": rid}) as response:
            assert response.status == 200

    async def used(self, server):
        """Tokens in use, by SGLang's own count, and requests in its disaggregation queues."""
        async with self.session.get(f"http://127.0.0.1:{server.port}/v1/loads?include=all") as response:
            (load,) = (await response.json())["loads"]
        queues = {name: count for name, count in load["disaggregation"].items() if name.endswith("reqs") and count}
        return load["num_used_tokens"], queues

    async def state(self, server):
        """The connector's state."""
        async with self.session.get(f"http://127.0.0.1:{server.admin}/v1/state") as response:
            return await response.json()

    async def until(self, condition, limit_s=30.0):
        """Wait until an async condition is true."""
        deadline = time.monotonic() + limit_s
        while not await condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            await asyncio.sleep(0.05)


def run(work, servers):
    """Run a coroutine function with a client."""

    async def main():
        timeout = aiohttp.ClientTimeout(total=CLIENT_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            await work(Client(session, *servers))

    asyncio.run(main())
