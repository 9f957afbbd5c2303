"""Errors in OpenAI's shape, whatever raised them."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kvq.engine.options import describe_problem
from kvq.engine.protocol import error_body
from kvq.errors import EngineError, KvqError

logger = logging.getLogger("kvq")

#: Longest message of an error; a validator may quote the request.
_MOST_CHARACTERS = 600

_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_implemented_error",
    503: "server_error",
}


class ServerError(Exception):
    """An error with a status of its own.

    Parameters
    ----------
    status : int
        HTTP status.
    message : str
    param, code : str, optional
        As in OpenAI's error body.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def error_response(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> JSONResponse:
    """An error as a response."""
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(error_content(status, message, param, code), status, headers)


def error_content(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of an error: one line, and text that UTF-8 can carry."""
    line = " ".join(message.split())[:_MOST_CHARACTERS]
    clean = [
        None if text is None else text.encode(errors="backslashreplace").decode() for text in (line, param)
    ]
    return error_body(clean[0] or "", _KINDS.get(status, "invalid_request_error"), clean[1], code)


def status_of(error: Exception) -> int:
    """The status that an error of kvq's has: the caller's fault, or the engine's."""
    if isinstance(error, ServerError):
        return error.status
    if isinstance(error, EngineError):
        return 500
    return 400 if isinstance(error, KvqError) else 500


def add_handlers(app: FastAPI) -> None:
    """Have an application answer every error in OpenAI's shape."""

    @app.exception_handler(ServerError)
    async def _server_error(_: Request, error: ServerError) -> JSONResponse:
        return error_response(error.status, str(error), error.param, error.code)

    @app.exception_handler(KvqError)
    async def _kvq_error(request: Request, error: KvqError) -> JSONResponse:
        ended = isinstance(error, EngineError) and request.app.state.service.draining
        return error_response(503 if ended else status_of(error), str(error))

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        problem = dict(error.errors()[0])
        if problem["type"] == "json_invalid":
            return error_response(400, "the body is not valid JSON")
        problem["loc"] = problem["loc"][1:]
        if not problem["loc"] and problem["type"] != "value_error":
            return error_response(400, "the body must be a JSON object, with Content-Type: application/json")
        key, text = describe_problem(problem)
        return error_response(400, text, key or None)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        response = error_response(error.status_code, message)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, error: Exception) -> JSONResponse:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(500, "the server failed; its log says why")
