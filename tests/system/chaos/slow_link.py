"""A slow network between clients and a server on loopback: a relay that waits before it passes
bytes on. In: the server's port. Out: a port of its own; `delay_s` may change at any time."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

PIECE_BYTES = 1 << 16


class SlowLink:
    """Relays at once; `close` ends it. The server may come and go meanwhile."""

    def __init__(self, port: int) -> None:
        self.delay_s = 0.0  # before each piece
        self._target = ("127.0.0.1", port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._is_closed = False
        threading.Thread(target=self._accept, name="slow link", daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        self._listening.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._listening.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target, 10)
        except OSError:  # it is away, which its client is to see
            client.close()
            return
        server.settimeout(None)
        back = threading.Thread(target=self._pass_on, args=(server, client), daemon=True)
        back.start()
        self._pass_on(client, server)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                time.sleep(self.delay_s)
                target.sendall(piece)
        for end in (source, target):  # the other thread's reads end with it
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
