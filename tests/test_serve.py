"""The server over the fake model: shapes, errors, limits, cancellation, metrics, shutdown."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fake_model import END_OF_TURN
from kvq.cli.main import main
from kvq.errors import ConfigError
from kvq.serve.app import ServerOptions, default_model_id
from kvq.serve.run import _server, bind, url_of
from serving import Served, serve_fake

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve_fake() as served:
        yield served
        served.check_idle()


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream's events; the last one must be ``[DONE]``."""
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, which must have OpenAI's shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert "\n" not in body["error"]["message"] and body["error"]["message"]
    return dict(body["error"])


# ---- answers ---------------------------------------------------------------------------------------
def test_text_is_the_models_own(served: Served) -> None:
    expected = "".join(map(chr, served.model.greedy(list(b"hello"), 12)))
    body = served.text("hello", max_tokens=12).json()
    assert body["object"] == "text_completion" and body["model"] == "fake"
    assert body["choices"] == [{"index": 0, "text": expected, "logprobs": None, "finish_reason": "length"}]
    assert body["usage"]["prompt_tokens"] == 5 and body["usage"]["total_tokens"] == 17
    parts = events(served.text("hello", max_tokens=12, stream=True))
    assert "".join(part["choices"][0]["text"] for part in parts) == expected
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * 11 + ["length"]
    assert {part["id"] for part in parts} == {parts[0]["id"]}


def test_several_prompts_and_choices_keep_their_order(served: Served) -> None:
    prompts = ["one", "two", "three"]
    body = served.post("/v1/completions", prompt=prompts, n=2, max_tokens=4).json()
    texts = [choice["text"] for choice in body["choices"]]
    alone = [served.text(prompt, max_tokens=4).json()["choices"][0]["text"] for prompt in prompts]
    assert texts == [alone[0], alone[0], alone[1], alone[1], alone[2], alone[2]]
    assert body["usage"]["prompt_tokens"] == 11 and body["usage"]["completion_tokens"] == 24
    ids = [[ord(char) for char in prompt] for prompt in prompts]
    assert [
        c["text"] for c in served.post("/v1/completions", prompt=ids, max_tokens=4).json()["choices"]
    ] == alone


def test_choices_of_a_stream_are_interleaved(served: Served) -> None:
    options: dict[str, Any] = {"n": 3, "seed": 5, "temperature": 1, "max_tokens": 8}
    parts = events(served.chat("hi", stream=True, stream_options={"include_usage": True}, **options))
    order = [part["choices"][0]["index"] for part in parts[:-1]]
    assert sorted(order) == sorted([0, 1, 2] * 8)
    assert order.index(2) < len(order) - 1 - order[::-1].index(0), "the last begins before the first ends"
    streamed = [""] * 3
    for part in parts[:-1]:
        streamed[part["choices"][0]["index"]] += part["choices"][0]["delta"].get("content", "")
    whole = served.chat("hi", **options).json()
    assert streamed == [choice["message"]["content"] for choice in whole["choices"]]
    assert parts[-1]["choices"] == [] and parts[-1]["usage"] == whole["usage"] | {
        "prompt_tokens_details": parts[-1]["usage"]["prompt_tokens_details"]
    }


def test_deltas_carry_only_what_is_new(served: Served) -> None:
    parts = events(served.chat("hi", stream=True, max_tokens=3))
    assert [sorted(part["choices"][0]["delta"]) for part in parts] == [
        ["content", "role"],
        ["content"],
        ["content"],
    ]
    assert "tool_calls" not in served.chat("hi", max_tokens=3).json()["choices"][0]["message"]


def test_an_event_is_one_line_whatever_the_answer_holds(served: Served) -> None:
    served.model.script = {3: 0x85, 4: 0x0B, 5: 0x0A}
    try:
        response = served.text("abc", max_tokens=3, stream=True)
    finally:
        served.model.script = {}
    lines = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert [line["choices"][0]["text"] for line in lines] == ["\x85", "\x0b", "\n"]


def test_a_prefix_hit_is_told(served: Served) -> None:
    prompt = "p" * 100
    first = served.text(prompt, max_tokens=2).json()
    again = served.text(prompt, max_tokens=2).json()
    assert again["choices"] == first["choices"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


def test_models(served: Served) -> None:
    listed = served.http.get("/v1/models").json()
    assert listed["object"] == "list" and listed["data"][0]["id"] == "fake"
    assert listed["data"][0]["max_model_len"] == 300
    assert served.http.get("/v1/models/fake").json() == listed["data"][0]
    assert error_of(served.http.get("/v1/models/other"), 404)["code"] == "model_not_found"
    assert error_of(served.text("x", model="other"), 404)["code"] == "model_not_found"
    assert default_model_id("/models/llama-q4/") == "llama-q4" and default_model_id("a/b.gguf") == "b"


# ---- errors ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1, not 0"),
        ({"n": 1000}, "n: Input should be less than or equal to 128"),
        ({"prompt": ["x"] * 65, "n": 2}, "too many"),
        ({"temprature": 1}, "unknown option 'temprature'"),
        ({"top_p": 2}, "top_p: "),
        ({"logit_bias": {"300": 1}}, "300"),
        ({"logit_bias": {"1": 1e9}}, "between -100 and 100"),
        ({"stop": ["x"] * 17}, "at most 16"),
        ({"prompt": []}, "empty"),
        ({"prompt": ""}, "empty"),
        ({"prompt": [5000]}, "outside"),
        ({"prompt": [[1], []]}, "empty"),
        ({"prompt": "x" * 300}, "300 tokens and the context window 300"),
        ({"prompt": "\ud800"}, "surrogate"),
        ({"echo": True}, "echo"),
        ({"logprobs": 50}, "logprobs: "),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema"),
        ({"response_format": {"type": "json_object", "schema": {"type": "x"}}}, "not valid"),
        ({"response_format": {"type": "regex", "regex": "("}}, "not valid"),
    ],
)
def test_impossible_requests_are_refused(served: Served, options: dict[str, Any], message: str) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 5} | options)
    response = served.http.post("/v1/completions", content=body, headers=JSON)
    assert message in error_of(response, 400)["message"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "role and a content"),
        ({"messages": [{"content": "x"}]}, "role is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        ({"top_logprobs": 3}, "needs logprobs"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
            "'g'",
        ),
    ],
)
def test_impossible_chats_are_refused(served: Served, options: dict[str, Any], message: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3} | options
    assert message in error_of(served.post("/v1/chat/completions", **body), 400)["message"]


@pytest.mark.parametrize("content", [b"{", b"[]", b"", b"\xff", b"[" * 100_000, b'{"prompt": NaN}'])
def test_bodies_that_are_no_request(served: Served, content: bytes) -> None:
    response = served.http.post(
        "/v1/completions", content=content, headers={"content-type": "application/json"}
    )
    error_of(response, 400)


def test_other_errors_have_the_shape_too(served: Served) -> None:
    assert error_of(served.http.get("/nothing"), 404)["type"] == "not_found_error"
    error_of(served.http.get("/v1/completions"), 405)
    error = error_of(served.post("/v1/embeddings", input="x", model="fake"), 501)
    assert "embeddings" in error["message"]


def test_more_than_the_pool_is_refused() -> None:
    with serve_fake(num_pages=4) as served:
        error = error_of(served.text("x" * 100, max_tokens=150), 400)
        assert "KV cache holds" in error["message"]
        assert served.text("x" * 100, max_tokens=20).status_code == 200


def test_a_failed_step_is_an_error_of_that_request_alone() -> None:
    with serve_fake() as served:
        served.model.poison = lambda seen: bytes(seen).startswith(b"bad")
        error = error_of(served.text("bad", max_tokens=5), 500)
        assert "not finite" in error["message"] and error["type"] == "server_error"
        parts = events(served.text("bad", max_tokens=5, stream=True))
        assert set(parts[-1]) == {"error"}
        assert served.text("good", max_tokens=5).status_code == 200
        served.check_idle()


# ---- limits ----------------------------------------------------------------------------------------
def test_large_bodies_are_refused() -> None:
    with serve_fake(max_body_bytes=1000) as served:
        assert "1000 bytes" in error_of(served.text("x" * 1000), 413)["message"]

        def chunks() -> Iterator[bytes]:
            yield b'{"prompt": "'
            for _ in range(10):
                yield b"x" * 500

        error_of(served.http.post("/v1/completions", content=chunks()), 413)
        assert served.text("x" * 200, max_tokens=1).status_code == 200


def test_the_api_key_guards_the_api() -> None:
    with serve_fake(api_key="sesame") as served:
        headers = {"Authorization": "Bearer sesame"}
        assert httpx.get(f"{served.url}/v1/models", headers=headers).status_code == 200
        bad = [{}, *({"Authorization": text} for text in ("Bearer wrong", "sesame", "Bearer \xe9"))]
        for wrong in bad:
            raw = {name: value.encode("latin-1") for name, value in wrong.items()}
            response = httpx.get(f"{served.url}/v1/models", headers=raw)
            assert error_of(response, 401)["code"] == "invalid_api_key"
        assert httpx.get(f"{served.url}/health").status_code == 200


# ---- clients that leave ----------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_dropped_connection_frees_its_pages(stream: bool, n: int) -> None:
    with serve_fake(step_seconds=0.01) as served:
        body = json.dumps(
            {"prompt": "x" * 100, "max_tokens": 150, "stream": stream, "n": n, "ignore_eos": True}
        )
        connection = _send(served, body)
        served.wait_until(lambda: served.core.stats().running == n)
        connection.close()
        served.wait_until(lambda: served.core.stats().cancelled == n, 5)
        served.check_idle()


def test_a_reader_that_stops_reading_holds_nothing() -> None:
    with serve_fake() as served:
        body = json.dumps({"prompt": "x", "max_tokens": 200, "stream": True, "n": 8, "logprobs": 20})
        connection = _send(served, body, receive_buffer=2048)
        served.wait_until(lambda: served.core.stats().finished == 8)
        assert served.core.stats().used_pages == 0
        assert served.text("y", max_tokens=3).status_code == 200
        connection.close()
        served.check_idle()


def _send(served: Served, body: str, receive_buffer: int | None = None) -> socket.socket:
    """A connection that has sent a request and reads nothing."""
    url = httpx.URL(served.url)
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((url.host, url.port))
    head = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    text = "\r\n".join([*head, f"Content-Length: {len(body)}", "", body])
    connection.sendall(text.encode())
    return connection


# ---- figures ---------------------------------------------------------------------------------------
def figures(served: Served) -> dict[str, float]:
    families = text_string_to_metric_families(served.http.get("/metrics").text)
    return {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_metrics_count_what_happens() -> None:
    with serve_fake() as served:
        served.text("m" * 70, max_tokens=6, n=2)
        served.text("m" * 70, max_tokens=6)
        seen = figures(served)
        assert seen["kvq_requests_total"] == seen["kvq_requests_finished_total"] == 3
        assert seen["kvq_prompt_tokens_total"] == 210 and seen["kvq_generated_tokens_total"] == 18
        assert seen["kvq_prefix_hit_tokens_total"] >= 64
        assert seen["kvq_time_to_first_token_seconds_count"] == 3
        assert seen["kvq_inter_token_seconds_count"] == 15
        assert seen["kvq_requests_running"] == seen["kvq_requests_waiting"] == seen["kvq_pages_used"] == 0
        assert seen["kvq_pages"] == 40 and seen["kvq_pages_cached"] >= 2
        stats = served.http.get("/stats").json()
        assert stats["model"] == "fake" and stats["generated_tokens"] == 18


def test_metrics_see_what_runs_and_waits() -> None:
    with serve_fake(num_open=2, step_seconds=0.02) as served, ThreadPoolExecutor() as pool:
        answers = [pool.submit(served.text, f"prompt {i}", max_tokens=20) for i in range(5)]
        served.wait_until(lambda: served.core.stats().running == 2 and served.core.stats().waiting > 0)
        seen = figures(served)
        assert seen["kvq_requests_running"] == 2 and seen["kvq_requests_waiting"] >= 1
        assert all(answer.result().status_code == 200 for answer in answers)


# ---- the process -----------------------------------------------------------------------------------
@pytest.mark.parametrize("patience", [10.0, 0.05])
def test_a_shutdown_finishes_or_reports_what_runs(patience: float) -> None:
    """What the signal handler does, without a signal."""
    with serve_fake(step_seconds=0.01) as served:
        listener = bind("127.0.0.1", 0)
        server = _server(served.engine, ServerOptions("fake"), patience)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        with httpx.Client(base_url=url_of(listener), timeout=30) as http, ThreadPoolExecutor() as pool:
            body = {"prompt": "x", "max_tokens": 60, "stream": True}
            answer = pool.submit(http.post, "/v1/completions", json=body)
            served.wait_until(lambda: served.core.stats().running == 1)
            server.handle_exit(signal.SIGTERM, None)
            parts = events(answer.result())
            if patience > 1:
                assert parts[-1]["choices"][0]["finish_reason"] == "length" and len(parts) == 60
            else:
                assert "shutting down" in parts[-1]["error"]["message"] and len(parts) < 60
        thread.join(20)
        server.join_drain()
        assert not thread.is_alive() and not served.core.has_work
        listener.close()


def test_during_a_shutdown_nothing_new_is_taken() -> None:
    with serve_fake(step_seconds=0.01) as served, ThreadPoolExecutor() as pool:
        answer = pool.submit(served.text, "x", max_tokens=100)
        served.wait_until(lambda: served.core.stats().running == 1)
        served.server.service.draining = True
        assert served.http.get("/health").status_code == 503
        assert "shutting down" in error_of(served.text("y"), 503)["message"]
        served.engine.shutdown()
        error_of(answer.result(), 503)


def test_a_port_in_use_is_refused_in_one_line() -> None:
    listener = bind("127.0.0.1", 0)
    with pytest.raises(ConfigError, match="in use"):
        bind("127.0.0.1", listener.getsockname()[1])
    with pytest.raises(ConfigError, match="65535"):
        bind("127.0.0.1", 99999)
    with pytest.raises(ConfigError, match="cannot listen"):
        bind("no.such.host.invalid", 0)
    listener.close()


def test_stop_tokens_and_strings_end_an_answer() -> None:
    with serve_fake() as served:
        full = served.text("hello", max_tokens=30).json()["choices"][0]["text"]
        stopped = served.text("hello", max_tokens=30, stop=full[10:12]).json()["choices"][0]
        assert stopped["finish_reason"] == "stop" and stopped["text"] == full[: full.find(full[10:12])]
        served.model.script[9] = END_OF_TURN
        ended = served.text("hello", max_tokens=30).json()["choices"][0]
        assert ended["finish_reason"] == "stop" and ended["text"] == full[:4]


@pytest.mark.parametrize(("command", "package"), [("serve", "uvicorn"), ("bench", "httpx")])
def test_without_the_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, package: str
) -> None:
    for name in [name for name in sys.modules if name.startswith(("kvq.serve", "kvq.bench.serve"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    words = {"serve": ["serve", "model"], "bench": ["bench", "serve", "--url", "http://127.0.0.1:9"]}[command]
    assert main(words) == 2
    assert f"needs the package {package}: pip install 'kvq[serve]'" in capsys.readouterr().err
