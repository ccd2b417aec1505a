"""The controller's HTTP API as the command line uses it: one call, one answer, or one failure with its exit code.

Never retries a write, and never puts the token anywhere but into the Authorization header.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.output import Exit, fail, say

if TYPE_CHECKING:
    import ssl

    import httpx

PREFIX = "/api/v1"
LOCAL = ("127.0.0.1", "localhost", "::1")

ServerOption = Annotated[str, typer.Option("--server", envvar="FLUIDPD_SERVER", help="address of the controller", metavar="URL")]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=0.1, help="seconds to wait for an answer")]
DEFAULT_SERVER = "http://127.0.0.1:8070"


class CallFailed(Exception):
    """A call that did not succeed, as a sentence and an exit code."""

    def __init__(self, message: str, code: Exit) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


def read_token(environ: Mapping[str, str]) -> str | None:
    """The token of FLUIDPD_TOKEN, else the content of the file FLUIDPD_TOKEN_FILE names."""
    if token := environ.get("FLUIDPD_TOKEN", "").strip():
        return token
    if not (name := environ.get("FLUIDPD_TOKEN_FILE", "")):
        return None
    try:
        token = Path(name).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as problem:
        raise CallFailed(f"cannot read the token file {name} (FLUIDPD_TOKEN_FILE): {problem}", Exit.CONFIG) from problem
    if not token:
        raise CallFailed(f"the token file {name} (FLUIDPD_TOKEN_FILE) is empty", Exit.CONFIG)
    return token


def tls_context(environ: Mapping[str, str]) -> ssl.SSLContext | bool:
    """Whom to believe, and what to show: FLUIDPD_CA_FILE, FLUIDPD_CERT_FILE and FLUIDPD_KEY_FILE; True without any."""
    import ssl

    ca, certificate, key = (environ.get(name) for name in ("FLUIDPD_CA_FILE", "FLUIDPD_CERT_FILE", "FLUIDPD_KEY_FILE"))
    if not ca and not certificate:
        return True
    try:
        context = ssl.create_default_context(cafile=ca or None)
        if certificate:
            context.load_cert_chain(certificate, key or None)
    except (OSError, ssl.SSLError) as problem:
        raise CallFailed(
            f"FLUIDPD_CA_FILE, FLUIDPD_CERT_FILE or FLUIDPD_KEY_FILE cannot be used: {problem}", Exit.CONFIG
        ) from problem
    return context


class Api:
    """A connection to one controller."""

    def __init__(
        self, server: str, token: str | None = None, timeout_s: float = 10.0, transport: httpx.BaseTransport | None = None
    ) -> None:
        import httpx

        try:
            url = httpx.URL(server)
        except httpx.InvalidURL as problem:
            raise CallFailed(f"{server!r} is no address: {problem}", Exit.USAGE) from problem
        if url.scheme not in ("http", "https") or not url.host:
            raise CallFailed(f"{server!r} is no address: write http://host:port or https://host:port", Exit.USAGE)
        if token and url.scheme == "http" and url.host not in LOCAL:
            say(f"fluidpd: warning: the token travels unencrypted to {url.host}; use https")
        headers = {"Accept": "application/json, application/problem+json", "X-FluidPD-Source": "cli"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self.server = server.rstrip("/")
        self._http = httpx.Client(
            base_url=self.server + PREFIX,
            headers=headers,
            timeout=timeout_s,
            transport=transport,
            verify=tls_context(os.environ) if url.scheme == "https" else True,
        )

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, params: Mapping[str, Any] | None = None) -> Any:
        return self._call("GET", path, params={name: value for name, value in (params or {}).items() if value is not None})

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._call("POST", path, json=dict(body))

    def delete(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._call("DELETE", path, **({"json": dict(body)} if body else {}))

    def _call(self, method: str, path: str, **request: Any) -> Any:
        import httpx

        try:
            answer = self._http.request(method, path, **request)
        except (httpx.ConnectError, httpx.ConnectTimeout) as problem:
            raise CallFailed(
                f"no controller answers at {self.server} ({problem}). "
                "Start one with `fluidpd controller`, or name it: --server URL or FLUIDPD_SERVER.",
                Exit.UNREACHABLE,
            ) from problem
        except httpx.TimeoutException as problem:
            doubt = (
                "" if method == "GET" else " It may still have been carried out: look with `fluidpd status` before you repeat it."
            )
            raise CallFailed(f"{self.server} did not answer in time (--timeout waits longer).{doubt}", Exit.TIMEOUT) from problem
        except httpx.HTTPError as problem:
            raise CallFailed(f"the connection to {self.server} broke: {problem}. Try again.", Exit.UNREACHABLE) from problem
        return judged(answer, self.server)


def judged(answer: httpx.Response, server: str) -> Any:
    """The body of a good answer; a failure for any other."""
    try:
        body = answer.json() if answer.content else None
    except ValueError:
        body = None
        if answer.is_success:
            raise CallFailed(f"what answers at {server} is no FluidPD controller; check --server", Exit.FAILURE) from None
    if answer.is_success:
        return body
    problem = body if isinstance(body, dict) else {}
    raise CallFailed(*sentence(answer.status_code, problem, server))


def sentence(status: int, problem: Mapping[str, Any], server: str) -> tuple[str, Exit]:
    """A problem document as one line and its exit code."""
    said = str(problem.get("detail") or problem.get("title") or f"HTTP {status}")
    rule = problem.get("rule")
    if rule and status in (409, 422):
        return f"refused by the rule {rule}: {said}", Exit.REFUSED
    if status == 401:
        return (
            f"{server} wants a token: {said}. Put it into a file that only you can read and set FLUIDPD_TOKEN_FILE.",
            Exit.FAILURE,
        )
    if status == 403:
        return f"your token may not do this: {said}", Exit.FAILURE
    if status == 404:
        hint = "" if "fluidpd " in said else ". `fluidpd workers` and `fluidpd transitions` list what there is."
        return f"not found: {said}{hint}", Exit.NOT_FOUND
    if status in (409, 412):
        return f"conflict: {said}. Look again, then repeat if it still applies.", Exit.CONFLICT
    if status in (400, 413, 415, 422):
        return f"the controller cannot use this request: {said}{fields(problem)}", Exit.USAGE
    if status == 504:
        return f"the controller ran out of time: {said}", Exit.TIMEOUT
    if status in (429, 503):
        return f"the controller cannot do this now{f' (rule {rule})' if rule else ''}: {said}", Exit.UNAVAILABLE
    return f"the controller failed (HTTP {status}): {said}. Its log says more.", Exit.FAILURE


def fields(problem: Mapping[str, Any]) -> str:
    """Which fields of a request were wrong, where the controller names them."""
    errors = problem.get("errors")
    if not isinstance(errors, list):
        return ""
    named = []
    for error in errors:
        if isinstance(error, dict):
            where = error.get("field") or error.get("loc") or error.get("pointer") or ""
            where = ".".join(str(part) for part in where if part != "body") if isinstance(where, list) else str(where)
            named.append(f"{where}: {error.get('msg') or error.get('detail') or 'invalid'}")
    named = [clause for clause in named if clause not in str(problem.get("detail"))]
    return f" ({'; '.join(named)})" if named else ""


@contextmanager
def reaching(context: typer.Context, server: str, timeout_s: float) -> Iterator[Api]:
    """The API for one command; any failure ends the command with its line and exit code.

    A transport in the context's object replaces the network: that is how tests run commands.
    """
    try:
        with Api(server, read_token(os.environ), timeout_s, context.find_root().obj) as api:
            yield api
    except CallFailed as problem:
        fail(problem.message, problem.code)
