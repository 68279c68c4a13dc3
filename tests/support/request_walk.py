"""The functions that pass a request on from its handler until it is written to the replica.

A program of its own, because an application that starts changes the process: its log and garbage collector.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from benchmarks.in_process import REPLICA, TimelessLoop, build_requests, connect
from gateway.fleet.transports import HttpCall
from gateway.http_client.connection import UpstreamConnection
from gateway.inference.body import RequestBody
from gateway.inference.pipeline import OpenedRequest
from gateway.routes.infer import handle_infer
from gateway.tensors.inputs import DecodedBody, InferInputs
from gateway.tensors.payload import Payload
from gateway.triton.inference import InferRequest
from tests.support.servers import ROOT

REQUEST = "/v1, text to BYTES"
CONTENT = b"The ship left the harbour at dawn."
FORMS = (RequestBody, OpenedRequest, Payload, DecodedBody, InferInputs, InferRequest, HttpCall)
FIRST, LAST = handle_infer.__code__, UpstreamConnection.send.__code__


def contains_request(value: Any) -> bool:
    if isinstance(value, FORMS):
        return True
    if isinstance(value, (tuple, list)):
        return any(map(contains_request, value))
    return isinstance(value, bytes) and CONTENT in value


def list_callers(frame: FrameType | None) -> Iterator[CodeType]:
    """Yield the functions from a frame up to the handler."""
    while frame is not None:
        yield frame.f_code
        frame = None if frame.f_code is FIRST else frame.f_back


class RequestWalk:
    """A profiler that collects the functions that pass a request on, until it is written.

    These are the functions that return the request in one of its forms, and the callers of the last function.
    """

    def __init__(self) -> None:
        self.functions: dict[CodeType, None] = {}
        self.is_started = False
        self.is_written = False

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        self.is_started = self.is_started or code is FIRST
        if not self.is_started or self.is_written:
            return
        if code is LAST and event == "call":
            self.functions |= dict.fromkeys(list_callers(frame))
            self.is_written = True
        elif event == "return" and contains_request(value) and not code.co_name.startswith("__"):
            self.functions[code] = None

    @property
    def names(self) -> list[tuple[str, str]]:
        """Return the module and name of each function of the gateway, comprehensions excluded."""
        paths = ((Path(code.co_filename), code.co_name) for code in self.functions)
        return [
            (str(path.relative_to(ROOT / "gateway")), name)
            for path, name in paths
            if path.is_relative_to(ROOT / "gateway") and not name.startswith("<")
        ]


async def walk_request() -> RequestWalk:
    client = await connect(asyncio.get_running_loop())
    request = build_requests()[REQUEST]
    for _ in range(3):  # reads the signature, and opens a connection
        await client.send(request)
    walk = RequestWalk()
    previous = sys.getprofile()
    sys.setprofile(walk)
    try:
        await client.send(request)
    finally:
        sys.setprofile(previous)
    return walk


def main() -> None:
    """Print the module and name of each function."""
    loop = TimelessLoop()
    loop.replica = REPLICA
    walk = loop.run_until_complete(walk_request())
    if not walk.is_written:
        raise SystemExit("the request was not written to the replica")
    print("\n".join(" ".join(each) for each in walk.names), flush=True)
    os._exit(0)  # without timers, the gateway cannot shut down


if __name__ == "__main__":
    main()
