"""What samples of all requests cost, also while their sink does not answer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np

from benchmarks import servers
from benchmarks.requests import encode_v2_infer
from benchmarks.run import Run
from benchmarks.tables import Target
from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.servers import blackhole

PATH = "/v2/models/small/infer"
NO_SAMPLES = "no samples"


def table(triton: EmbeddedTriton, stack: ExitStack, run: Run) -> Iterator[str]:
    """Measure requests of one connection, of which all or 1 % are sampled."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    port = stack.enter_context(blackhole())
    sinks = {
        NO_SAMPLES: ("", "0"),
        "1 % to a folder": (f"file://{folder}/one", "0.01"),
        "all to a folder": (f"file://{folder}/all", "1"),
        "all to a sink that does not answer": (f"http://127.0.0.1:{port}", "1"),
    }
    request = encode_v2_infer(np.ones((1, 256), np.float32), "FP32")
    targets = []
    for name, (sink, rate) in sinks.items():
        settings = {"GATEWAY_SAMPLES": sink, "GATEWAY_SAMPLE_RATE": rate}
        url, process = stack.enter_context(servers.gateway(triton.options.url, 1, settings))
        targets.append(Target(name, f"{url}{PATH}", process, request))
    title = "1 KB, 1 connection, samples"
    yield from run.tabulate(title, run.measure(targets, 1), NO_SAMPLES)
