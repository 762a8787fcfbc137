import socket
import threading

from pdpool_connector.transport.http import START_S, HttpServer, Page


def test_a_connection_that_comes_just_before_the_close_is_closed() -> None:
    server = HttpServer("127.0.0.1")
    port = server.serve(0, {"/": Page("text/plain", lambda: b"")})
    clients: list[socket.socket] = []
    busy, closing = threading.Event(), threading.Event()

    async def connect_while_the_loop_is_held() -> None:
        clients.extend(socket.create_connection(("127.0.0.1", port), timeout=START_S) for _ in range(3))
        busy.set()
        assert closing.wait(START_S)

    connected = server.submit(connect_while_the_loop_is_held())
    assert busy.wait(START_S)
    closer = threading.Thread(target=server.close)
    closer.start()
    while not server._loop._ready:
        pass
    closing.set()
    closer.join()
    connected.result(0)
    for client in clients:
        with client:
            assert client.recv(1) == b"", "closed by the server itself, not by the garbage collector"
