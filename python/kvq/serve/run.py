"""Runs the application on uvicorn: in the foreground for ``kvq serve``, in a thread for tools."""

from __future__ import annotations

import gc
import logging
import socket
import threading
from types import FrameType, TracebackType
from typing import Any

import uvicorn

from kvq.engine.async_engine import AsyncEngine
from kvq.errors import ConfigError
from kvq.serve.app import ServerOptions, Service, create_app

logger = logging.getLogger("kvq")

#: Seconds that connections get, after the engine is done, to take what is theirs.
_FLUSH_SECONDS = 5


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises
    ------
    ConfigError
        If the address is in use or not this machine's.
    """
    if not 0 <= port < 65536:
        raise ConfigError(f"--port {port} makes no sense: it must be between 0 and 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
        except BaseException:
            listener.close()
            raise
    except OSError as problem:
        reason = problem.strerror or problem
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}: choose another --port") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """The address of a socket as a URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """Asked to stop, it takes nothing new, lets what runs finish for a while, then has the rest aborted."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_seconds: float) -> None:
        super().__init__(config)
        self.service, self._drain_seconds = service, drain_seconds
        self._drain: threading.Thread | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own would raise the signal again after the last connection, before the engine is done.
        self.force_exit = self.should_exit
        self.should_exit = True
        self.begin_drain()

    def begin_drain(self) -> None:
        """Stop taking requests; returns at once."""
        if self._drain is not None:
            return
        self.service.draining = True
        self._drain = threading.Thread(target=self._shut_down_engine, name="kvq-drain", daemon=True)
        self._drain.start()

    def _shut_down_engine(self) -> None:
        engine = self.service.engine
        before = engine.stats()
        open_requests = before.running + before.waiting
        if open_requests:
            logger.warning(
                "shutting down: %d requests run and %d wait; they have %g seconds",
                before.running,
                before.waiting,
                self._drain_seconds,
            )
        aborted = engine.shutdown(self._drain_seconds)
        if open_requests:
            logger.warning("%d requests had to be aborted, the others were finished", aborted)

    def join_drain(self) -> None:
        """Wait for the engine, unless the user cannot wait."""
        if self._drain is not None and not self.force_exit:
            self._drain.join()


def _server(engine: AsyncEngine, options: ServerOptions, drain_seconds: float) -> _Server:
    app = create_app(engine, options)
    config = uvicorn.Config(
        app,
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=int(drain_seconds) + _FLUSH_SECONDS,
    )
    return _Server(config, app.state.service, drain_seconds)


def serve(engine: AsyncEngine, options: ServerOptions, listener: socket.socket, drain_seconds: float) -> None:
    """Serve until SIGINT or SIGTERM; then the engine is shut down.

    Parameters
    ----------
    drain_seconds : float
        What running requests get to finish; then they are aborted, and told so. A second signal ends all.
    """
    server = _server(engine, options, drain_seconds)
    # What is loaded stays: without it a collection of garbage, which stops all answers, is quickly done.
    gc.collect()
    gc.freeze()
    server.run(sockets=[listener])
    server.begin_drain()
    server.join_drain()


class ServerThread:
    """A server on a free port in a thread of its own, as a context manager; it leaves the engine running.

    Attributes
    ----------
    url : str
        Its address.
    service : Service
        What its routes share.
    """

    def __init__(self, engine: AsyncEngine, options: ServerOptions) -> None:
        self._listener = bind("127.0.0.1", 0)
        self.url = url_of(self._listener)
        self._server = _server(engine, options, drain_seconds=0)
        self.service = self._server.service
        arguments: dict[str, Any] = {"sockets": [self._listener]}
        self._thread = threading.Thread(target=self._server.run, kwargs=arguments, daemon=True)

    def __enter__(self) -> ServerThread:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()
