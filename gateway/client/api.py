"""The gateway's API for a person at a terminal: one call at a time, by httpx."""

from __future__ import annotations

from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx

from gateway.client.errors import ClientError, Unreachable, refusal
from gateway.client.target import Target

CONNECT_TIMEOUT_S = 5.0


class Api:
    """Raises `Unreachable` when nobody answers, and else what the gateway says itself."""

    def __init__(self, target: Target, timeout_s: float = 60.0) -> None:
        self.target = target
        self._client = httpx.Client(
            base_url=target.base,
            headers=target.headers,
            verify=target.tls or False,  # without TLS, certificates need not be read
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            trust_env=False,
        )

    def __enter__(self) -> Api:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    def get(self, path: str) -> Any:
        return document(self.answer("GET", path))

    def text(self, path: str) -> str:
        return checked(self.answer("GET", path)).text

    def model(self, name: str, version: str = "") -> dict[str, Any]:
        """What a model takes and gives."""
        found: dict[str, Any] = self.get(model_path(name, version))
        return found

    def answer(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """Whatever its status."""
        try:
            return self._client.request(method, path, json=body)
        except httpx.TimeoutException as exc:
            if isinstance(exc, httpx.ConnectTimeout):
                raise self._unreachable("it does not answer") from None
            raise ClientError(f"the gateway at {self.target.base} gave no answer in time") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as exc:
            raise self._unreachable(str(exc) or type(exc).__name__) from None

    def _unreachable(self, why: str) -> Unreachable:
        return Unreachable(f"no gateway can be reached at {self.target.base}: {why}")


def model_path(name: str, version: str = "") -> str:
    path = f"/v1/models/{quote(name, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def checked(response: httpx.Response) -> httpx.Response:
    """Raises `NotAllowed` or `ClientError` with the gateway's own sentence."""
    if response.is_success:
        return response
    raise refusal(response.status_code, sentence_of(response))


def document(response: httpx.Response) -> Any:
    try:
        return checked(response).json()
    except ValueError:
        raise Unreachable(f"what answers at {response.url} is no gateway") from None


def told_by(response: httpx.Response) -> dict[str, Any]:
    """The object that it is, whatever its status; an empty one if it is none."""
    try:
        told = response.json()
    except ValueError:
        told = None
    return told if isinstance(told, dict) else {}


def sentence_of(response: httpx.Response) -> str:
    if isinstance(sentence := told_by(response).get("error"), str):
        return sentence
    return f"{response.url.path} was answered with status {response.status_code}"
