"""A real Triton whose responses are edited on their way: a release that behaves differently."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from gateway.embedded.options import TritonOptions
from gateway.triton.grpc.byte_channel import STREAM_METHOD
from tests.support.fault_proxy import END_OF_HEAD, NO_FAULT, Fault, Proxy


@dataclass(frozen=True)
class Edit:
    """A pattern in the responses to requests that contain `to`, and what stands in its place.

    Over gRPC, a request contains its method as well, and the text of an error is a response. Without a
    pattern, gRPC calls fail with the replacement.
    """

    pattern: bytes
    replacement: bytes
    to: bytes = b""

    def apply(self, data: bytes) -> bytes:
        return re.sub(self.pattern, self.replacement, data)


# Calls go on although their client has cancelled them.
KEEPS_CALLS = Edit(b"(?!)", b"", b"ModelInfer")
NO_EDIT = Edit(b"(?!)", b"")


def edit_http(edit: Edit, data: bytes) -> bytes:
    head, _, body = data.partition(END_OF_HEAD)
    edited = edit.apply(body)
    length = b"Content-Length: %d"
    head = edit.apply(head).replace(length % len(body), length % len(edited))
    return head + END_OF_HEAD + edited


class Forwarder(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Forwards calls to the server at the port."""

    def __init__(self, port: int, find_edit: Callable[[], Edit]) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._find_edit = find_edit

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler:
        method = handler_call_details.method
        if method == STREAM_METHOD:
            return grpc.stream_stream_rpc_method_handler(self._stream)

        def forward(message: bytes, context: grpc.ServicerContext) -> bytes:
            edit = self._find_edit()
            applies = edit.to in method.encode() + message
            if applies and not edit.pattern:
                context.abort(grpc.StatusCode.INTERNAL, edit.replacement.decode())
            call = self._channel.unary_unary(method).future(
                message, metadata=context.invocation_metadata()
            )
            if edit is not KEEPS_CALLS:
                context.add_callback(call.cancel)
            try:
                response = bytes(call.result())
            except grpc.FutureCancelledError:
                context.abort(grpc.StatusCode.CANCELLED, "cancelled")
            except grpc.RpcError as exc:
                details = exc.details().encode()
                context.abort(exc.code(), (edit.apply(details) if applies else details).decode())
            return edit.apply(response) if applies else response

        return grpc.unary_unary_rpc_method_handler(forward)

    def _stream(self, messages: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        edit = self._find_edit()
        # Responses to one request, which is all that the gateway sends.
        for response in self._channel.stream_stream(STREAM_METHOD)(iter([next(messages)])):
            yield edit.apply(response)

    def close(self) -> None:
        self._channel.close()


class EditedTriton:
    """The addresses of the edited Triton, and the edit."""

    def __init__(self, proxy: Proxy, metrics: Proxy, grpc_port: int) -> None:
        self._proxies = (proxy, metrics)
        self.url = f"http://127.0.0.1:{proxy.port}?grpc={grpc_port}&metrics={metrics.port}"
        self.edit = NO_EDIT

    @contextmanager
    def having(self, edit: Edit) -> Iterator[None]:
        def find_fault(request: bytes) -> Fault:
            applies = edit.pattern and edit.to in request
            return Fault(edit=lambda data: edit_http(edit, data)) if applies else NO_FAULT

        with ExitStack() as stack:
            for proxy in self._proxies:
                stack.enter_context(proxy.having(find_fault))
            self.edit = edit
            yield
            self.edit = NO_EDIT


@contextmanager
def edited_triton(options: TritonOptions) -> Iterator[EditedTriton]:
    with Proxy(options.http_port) as proxy, Proxy(options.metrics_port) as metrics:
        forwarder = Forwarder(options.grpc_port, lambda: edited.edit)
        server = grpc.server(ThreadPoolExecutor(8), handlers=[forwarder])
        edited = EditedTriton(proxy, metrics, server.add_insecure_port("127.0.0.1:0"))
        server.start()
        try:
            yield edited
        finally:
            server.stop(None).wait()
            forwarder.close()
