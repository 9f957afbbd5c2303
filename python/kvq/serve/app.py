"""The HTTP application: routes of OpenAI's API, and the server's own."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool

from kvq import __version__
from kvq.engine.answers import Answer
from kvq.engine.ask import Asker
from kvq.engine.async_engine import AsyncEngine
from kvq.engine.options import ChatOptions, CommonOptions, TextOptions
from kvq.engine.protocol import (
    ChatCompletion,
    Completion,
    ErrorBody,
    Model,
    ModelList,
)
from kvq.engine.request import Request
from kvq.serve.answering import EventStream, Pieces, collect, events, until_gone
from kvq.serve.errors import ServerError, add_handlers
from kvq.serve.guards import ApiKey, BodyLimit
from kvq.serve.metrics import Metrics

#: Status of a request whose client left before it was answered; nobody sees it but the log.
_CLIENT_GONE = 499

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 413, 500, 503)
}


@dataclass(frozen=True)
class ServerOptions:
    """How to serve.

    Attributes
    ----------
    model_id : str
        The name that clients use.
    api_key : str or None
        What clients must send; None lets everybody in.
    max_body_bytes : int
        Largest body of a request.
    """

    model_id: str
    api_key: str | None = None
    max_body_bytes: int = 8 << 20


def default_model_id(model: str) -> str:
    """The name of a model for clients: its file or directory without the way to it."""
    return Path(model).name.removesuffix(".gguf") or model


class Service:
    """What the routes share: the engine, and how requests are made for it."""

    def __init__(self, engine: AsyncEngine, options: ServerOptions) -> None:
        self.engine, self.options = engine, options
        self.metrics = Metrics(engine.stats)
        self.ask = Asker(engine.tokenizer, engine.config, options.model_id, engine.check)
        self.draining = False

    def run(self, requests: list[Request]) -> Pieces:
        """Pieces of an answer, their times noted."""
        return self.metrics.observe(self.engine.run(requests))

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served."""
        if name is not None and name != self.options.model_id:
            raise ServerError(
                404,
                f"the model {name!r} is not served here: use {self.options.model_id!r}",
                "model",
                "model_not_found",
            )

    async def respond(self, http: HttpRequest, options: CommonOptions, make: Any) -> Response:
        """Answer a request, whole or as a stream.

        Parameters
        ----------
        make : callable
            Turns the options into an :class:`~kvq.engine.answers.Answer`; runs in a thread.
        """
        self.check_model(options.model)
        if self.draining:
            raise ServerError(503, "the server is shutting down: it takes no more requests")
        answer: Answer[Any, Any] = await run_in_threadpool(make, options)
        if options.stream:
            usage = bool(options.stream_options and options.stream_options.include_usage)
            return EventStream(events(self.run(answer.requests), answer, usage))
        whole = await until_gone(http, collect(self.run(answer.requests), answer))
        if whole is None:
            return Response(status_code=_CLIENT_GONE)
        return Response(whole.model_dump_json(), media_type="application/json")


def create_app(engine: AsyncEngine, options: ServerOptions) -> FastAPI:
    """The application over a running engine; whoever made the engine shuts it down.

    Its ``state.service`` is a :class:`Service`; while ``draining`` is set, requests get 503.
    """
    app = FastAPI(title="kvq", version=__version__, docs_url=None, redoc_url=None)
    service = app.state.service = Service(engine, options)
    add_handlers(app)
    if options.api_key is not None:
        app.add_middleware(ApiKey, key=options.api_key)
    app.add_middleware(BodyLimit, most_bytes=options.max_body_bytes)
    _add_openai_routes(app, service)
    _add_own_routes(app, service)
    return app


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    listed = Model(id=service.options.model_id, max_model_len=service.engine.context_window_size)

    @app.get("/v1/models", responses=_ERRORS)
    async def models() -> ModelList:
        """The model that is served."""
        return ModelList(data=[listed])

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def model(name: str) -> Model:
        """One model by its name."""
        service.check_model(name)
        return listed

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=_ERRORS)
    async def chat(options: ChatOptions, http: HttpRequest) -> Response:
        """Answer a conversation."""
        return await service.respond(http, options, service.ask.chat)

    @app.post("/v1/completions", response_model=Completion, responses=_ERRORS)
    async def text(options: TextOptions, http: HttpRequest) -> Response:
        """Continue a prompt, or several."""
        return await service.respond(http, options, service.ask.text)

    @app.post("/v1/embeddings", status_code=501, response_model=ErrorBody)
    async def embeddings() -> Response:
        """Not of this model."""
        raise ServerError(501, f"{service.options.model_id!r} generates text and makes no embeddings")


def _add_own_routes(app: FastAPI, service: Service) -> None:
    page = resources.files("kvq.serve").joinpath("status.html").read_text(encoding="utf-8")

    @app.get("/", include_in_schema=False)
    async def status_page() -> HTMLResponse:
        return HTMLResponse(page)

    @app.get("/health")
    async def health() -> JSONResponse:
        """Whether requests are taken: 200, or 503 during a shutdown."""
        if service.draining:
            return JSONResponse({"status": "shutting down"}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        """The engine at this moment, for the status page."""
        engine = service.engine
        return {"model": service.options.model_id, "version": __version__, **vars(engine.stats())}

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)
