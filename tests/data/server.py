"""A web server on this machine's own address whose answers are functions."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Asked(BaseHTTPRequestHandler):
    """A request. An answer writes what it likes."""

    server: "Server"

    def do_GET(self) -> None:
        self.close_connection = True
        self.server.requests.append(self.path)
        answer = self.server.answers.get(self.path)
        if answer is None:
            self.send_error(404)
            return
        with suppress(BrokenPipeError, ConnectionResetError):
            answer(self)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def head(self, status: int = 200, **headers: object) -> None:
        """Status and headers; Content_Length stands for Content-Length."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def send(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def gone(self) -> bool:
        """Waits a moment for the client to hang up, and says whether it has (or the test is over)."""
        self.connection.settimeout(0.01)
        try:
            return not self.connection.recv(1)
        except TimeoutError:
            return self.server.over.is_set()
        except OSError:
            return True

    def wait_for_hang_up(self) -> None:
        while not self.gone():
            pass


Answer = Callable[[Asked], object]


class Server(ThreadingHTTPServer):
    """`answers` are by path; `requests` are the paths that were asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Asked)
        self.answers: dict[str, Answer] = {}
        self.requests: list[str] = []
        self.over = threading.Event()
        self.address = f"http://127.0.0.1:{self.server_port}"


def whole(data: bytes, **headers: object) -> Answer:
    def answer(asked: Asked) -> None:
        asked.head(Content_Length=len(data), **headers)
        asked.send(data)

    return answer


def in_turn(*answers: Answer) -> Answer:
    """Another answer each time; the last one again and again."""
    left = list(answers)
    return lambda asked: (left.pop(0) if len(left) > 1 else left[0])(asked)


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        thread.join()
        server.server_close()
