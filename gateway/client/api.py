"""A synchronous client of the gateway's API, on httpx."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NoReturn
from urllib.parse import quote

import httpx
import orjson

from gateway.client.errors import AccessDenied, ClientError, GatewayUnreachable, translate_hints
from gateway.client.target import Target
from gateway.messages import quote_text

API_CONNECT_TIMEOUT_S = 5.0
ERRNO_PREFIX: Final = re.compile(r"^\[Errno -?\d+\] ")


class ApiClient:
    """A synchronous API client. Raises `GatewayUnreachable` if there is no response, else `ClientError`."""

    def __init__(self, target: Target, timeout_s: float = 60.0) -> None:
        self.target = target
        self._client = httpx.Client(
            base_url=target.base_url,
            headers=target.headers,
            verify=target.ssl_context or False,  # False skips loading the CA certificates
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, API_CONNECT_TIMEOUT_S)),
            trust_env=False,
        )

    def __enter__(self) -> ApiClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get(self, path: str) -> ResponseDocument:
        return self.call("GET", path)

    def call(self, method: str, path: str, body: Any = None, **options: Any) -> ResponseDocument:
        return decode_json_response(self.request(method, path, body, **options))

    def get_model(self, name: str, version: str = "") -> ResponseDocument:
        return self.get(model_api_path(name, version))

    def request(self, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """Return the response of any status. `options` are those of httpx, such as `files`.

        Raises `GatewayUnreachable`, or `ClientError` on timeout.
        """
        with self._translate_errors():
            return self._client.request(method, path, json=body, **options)

    def stream(self, path: str) -> Iterator[bytes]:
        """Yield the body of a successful response as it arrives. Raises the same errors."""
        with self._translate_errors(), self._client.stream("GET", path) as response:
            if not response.is_success:
                response.read()
            yield from check_status(response).iter_bytes()

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.TimeoutException as exc:
            if isinstance(exc, httpx.ConnectTimeout):
                raise self._unreachable_error("connection timed out") from None
            raise ClientError(
                f"the gateway at {self.target.base_url} did not respond in time"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as exc:
            reason = ERRNO_PREFIX.sub("", str(exc)) or type(exc).__name__
            raise self._unreachable_error(reason) from None

    def _unreachable_error(self, reason: str) -> GatewayUnreachable:
        return GatewayUnreachable(f"cannot reach the gateway at {self.target.base_url}: {reason}")


def model_api_path(name: str, version: str = "") -> str:
    path = f"/v1/models/{quote(name, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def label_api_path(model: str, label: str) -> str:
    path = f"{model_api_path(model)}/labels"
    return f"{path}/{quote(label, safe='')}" if label else path


def check_status(response: httpx.Response) -> httpx.Response:
    """Return a successful response. Raises `AccessDenied` or `ClientError` with the gateway's message."""
    if response.is_success:
        return response
    raise make_response_error(response)


def make_response_error(response: httpx.Response) -> ClientError:
    message = decode_json_object(response.content).get("error")
    if not isinstance(message, str):
        message = (
            f"the server at {response.url} returned HTTP status {response.status_code} without an"
            " error message; check that --url is the gateway's"
        )
    kind = AccessDenied if response.status_code in (401, 403) else ClientError
    return kind(translate_hints(message))


class ResponseDocument(dict[str, Any]):
    """The JSON object of a response. A missing field means that the server is not a gateway."""

    def __init__(self, url: httpx.URL, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self._url = url

    def __missing__(self, field: str) -> NoReturn:
        raise make_wrong_server_error(self._url, f"its response has no field {quote_text(field)}")


def decode_json_response(response: httpx.Response) -> ResponseDocument:
    try:
        document = check_status(response).json()
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise make_wrong_server_error(response.url, "its response is not a JSON object")
    return ResponseDocument(response.url, document)


def make_wrong_server_error(url: httpx.URL, reason: str) -> GatewayUnreachable:
    return GatewayUnreachable(f"the server at {url} is not a gateway: {reason}")


def decode_json_object(body: bytes) -> dict[str, Any]:
    """Return the body's JSON object; empty if the body is anything else."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    return document if isinstance(document, dict) else {}
