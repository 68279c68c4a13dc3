"""The gateway's API for a person at a terminal: one call at a time, by httpx."""

from __future__ import annotations

from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx

from gateway.client.errors import ClientError, GatewayUnreachable, make_client_error
from gateway.client.target import Target

API_CONNECT_TIMEOUT_S = 5.0


class ApiClient:
    """Raises `Unreachable` when nobody answers, and else what the gateway says itself."""

    def __init__(self, target: Target, timeout_s: float = 60.0) -> None:
        self.target = target
        self._client = httpx.Client(
            base_url=target.base_url,
            headers=target.headers,
            verify=target.ssl_context or False,  # without TLS, certificates need not be read
            timeout=httpx.Timeout(timeout_s, connect=API_CONNECT_TIMEOUT_S),
            trust_env=False,
        )

    def __enter__(self) -> ApiClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    def get(self, path: str) -> Any:
        return decode_json_response(self.request("GET", path))

    def get_text(self, path: str) -> str:
        return check_status(self.request("GET", path)).text

    def get_model(self, name: str, version: str = "") -> dict[str, Any]:
        """What a model takes and gives."""
        found: dict[str, Any] = self.get(model_api_path(name, version))
        return found

    def request(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """Whatever its status."""
        try:
            return self._client.request(method, path, json=body)
        except httpx.TimeoutException as exc:
            if isinstance(exc, httpx.ConnectTimeout):
                raise self._unreachable_error("it does not answer") from None
            raise ClientError(
                f"the gateway at {self.target.base_url} gave no answer in time"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as exc:
            raise self._unreachable_error(str(exc) or type(exc).__name__) from None

    def _unreachable_error(self, reason: str) -> GatewayUnreachable:
        return GatewayUnreachable(f"no gateway can be reached at {self.target.base_url}: {reason}")


def model_api_path(name: str, version: str = "") -> str:
    path = f"/v1/models/{quote(name, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def check_status(response: httpx.Response) -> httpx.Response:
    """Raises `NotAllowed` or `ClientError` with the gateway's own sentence."""
    if response.is_success:
        return response
    raise make_client_error(response.status_code, extract_error_message(response))


def decode_json_response(response: httpx.Response) -> Any:
    try:
        return check_status(response).json()
    except ValueError:
        raise GatewayUnreachable(f"what answers at {response.url} is no gateway") from None


def decode_json_object(response: httpx.Response) -> dict[str, Any]:
    """The object that it is, whatever its status; an empty one if it is none."""
    try:
        told = response.json()
    except ValueError:
        told = None
    return told if isinstance(told, dict) else {}


def extract_error_message(response: httpx.Response) -> str:
    if isinstance(sentence := decode_json_object(response).get("error"), str):
        return sentence
    return f"{response.url.path} was answered with status {response.status_code}"
