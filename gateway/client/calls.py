"""The requests of the API as values."""

from __future__ import annotations

import difflib
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

from gateway.client.bodies import (
    Body,
    Form,
    StreamedBody,
    contains_files,
    encode_inputs,
    encode_json,
)
from gateway.client.errors import GatewayError, InvalidRequest, add_hint
from gateway.client.models import ModelInfo
from gateway.media_types import JSON, NPZ

DOT_SEGMENTS: Final = (".", "..")
SEQUENCE_PARAMETER: Final = "sequence_id"
SEQUENCE_HEADER: Final = "x-sequence-id"
# The options of the client's methods, which a keyword may have been meant as.
OPTIONS: Final = ("version", "parameters", "classification", "headers", "timeout_s", "callback_url")
# Of an inference whose inputs do not fit the model.
WRONG_INPUT_STATUSES: Final = (400, 415, 422)


def quote_part(text: str) -> str:
    return quote(text, safe="")


def build_model_path(name: str, version: str | int = "") -> str:
    """Return the path of a model. Raises `InvalidRequest` for a name that would make another path of it."""
    version = str(version)
    if not name or name in DOT_SEGMENTS or version in DOT_SEGMENTS:
        raise InvalidRequest(f"{name!r} with version {version!r} is not a model")
    path = f"/v1/models/{quote_part(name)}"
    return f"{path}/versions/{quote_part(version)}" if version else path


def build_label_path(model: str, label: str) -> str:
    path = f"{build_model_path(model)}/labels"
    return f"{path}/{quote_part(label)}" if label else path


@dataclass(frozen=True)
class ApiRequest:
    """A request of the API. One that is not repeatable is sent again only if it was not executed."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Body | Form | StreamedBody | None = None
    is_repeatable: bool = False
    has_deadline: bool = False
    call: InferCall | None = None  # it is an inference, or describes the model of one

    def explain(self, error: GatewayError) -> GatewayError:
        return error if self.call is None else self.call.explain(error)


def build_json_request(
    method: str, path: str, document: Any = None, headers: Mapping[str, str] | None = None
) -> ApiRequest:
    body = None if document is None else encode_json(document)
    is_repeatable = method in ("GET", "HEAD")
    return ApiRequest(method, path, headers=headers or {}, body=body, is_repeatable=is_repeatable)


@dataclass(frozen=True)
class InferCall:
    """An inference: the model, its inputs and what the user asks for."""

    model: str
    value: Any = None
    by_name: Mapping[str, Any] = field(default_factory=dict)
    version: str | int = ""
    parameters: Mapping[str, Any] | None = None
    classification: int = 0
    headers: Mapping[str, str] | None = None
    timeout_s: float | None = None

    def check_inputs(self) -> InferCall:
        if self.value is None and not self.by_name:
            raise TypeError("an inference needs inputs: pass a value, or values by input name")
        return self

    @property
    def has_files(self) -> bool:
        return any(map(contains_files, self._list_values()))

    @property
    def needs_name(self) -> bool:
        return self.value is not None and bool(self.by_name)

    def _list_values(self) -> list[Any]:
        values = self.value.values() if isinstance(self.value, Mapping) else (self.value,)
        return [*values, *self.by_name.values()]

    def build_request(self, accept: str, info: ModelInfo | None) -> ApiRequest:
        """Return the request. Raises `TypeError` for inputs of an unknown type or without a name."""
        by_name = self.by_name
        if isinstance(self.value, Mapping):
            by_name = {**self.value, **by_name}
        elif self.needs_name and info is not None:
            by_name = {info.find_input_for(by_name): self.value, **by_name}
        headers = {name.lower(): value for name, value in (self.headers or {}).items()}
        parameters = self.parameters or {}
        return ApiRequest(
            "POST",
            f"{build_model_path(self.model, self.version)}/infer",
            query={"classification": str(self.classification)} if self.classification else {},
            headers={"idempotency-key": uuid.uuid4().hex, **headers, "accept": accept},
            body=encode_inputs(self.value, by_name, parameters),
            is_repeatable=SEQUENCE_PARAMETER not in parameters and SEQUENCE_HEADER not in headers,
            has_deadline=True,
            call=self,
        )

    def build_model_request(self) -> ApiRequest:
        path = build_model_path(self.model, self.version)
        return ApiRequest("GET", path, is_repeatable=True, call=self)

    def choose_accept(self, info: ModelInfo | None) -> str:
        """Return `.npz` for numbers that become arrays, else JSON."""
        return JSON if info is None or self.classification or not info.has_only_numbers else NPZ

    def explain(self, error: GatewayError) -> GatewayError:
        """Return the error, with what was probably meant by inputs that the model does not take."""
        if error.status not in WRONG_INPUT_STATUSES:
            return error
        for name in self.by_name:
            options = difflib.get_close_matches(name, OPTIONS, 1)
            if options and repr(name) in str(error):
                return add_hint(error, f"did you mean the option {options[0]}?")
        for value in self._list_values():
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, str) and os.path.isfile(item):  # noqa: PTH113 - of any length
                    return add_hint(error, f"{item!r} is a file: pass Path({item!r})")
        return error
