"""`make test-cluster CLUSTER_CONTEXT=NAME`: install on a real cluster, and disturb it under load.

Ends with status 1 if a promise was broken, and with 2 if the cluster cannot be used. Removes what it created,
also after Ctrl-C.
"""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
from functools import partial
from pathlib import Path

from gateway import __version__
from tests.cluster.kubectl import ClusterError, connect
from tests.cluster.resources import IMAGES
from tests.cluster.run import Choice, run_all
from tests.cluster.scene import Run
from tests.cluster.verdict import SETTLE_S, SLOW_S, format_table
from tests.support.servers import ROOT

INTERRUPTED = 130
UNUSABLE = 2


def parse_images(text: str) -> dict[str, str]:
    """Return the images by their role. Raises `ClusterError`."""
    images = {role: f"{IMAGES[role]}:{__version__}" for role in ("gateway", "embedded")}
    for word in text.split():
        role, separator, image = word.partition("=")
        if not separator or role not in IMAGES:
            raise ClusterError(
                f"IMAGES has '{word}'; write {', '.join(f'{each}=…' for each in IMAGES)}"
            )
        images[role] = image
    return images


def split_words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make test-cluster", description=__doc__)
    parser.add_argument("--context", default="", help="must be the current context of kubectl")
    parser.add_argument("--images", default="", help="gateway=… embedded=… redis=…")
    parser.add_argument("--without", default="", help="words of rows to leave out: CoreDNS,node")
    parser.add_argument("--only", default="", help="words of the events to cause")
    parser.add_argument("--node-down", default="", help="ends a node: docker kill {node}")
    parser.add_argument("--node-up", default="", help="starts it again: docker start {node}")
    parser.add_argument(
        "--settle",
        type=float,
        default=SETTLE_S,
        help="seconds: 40 if the DNS keeps answers for 30 s",
    )
    parser.add_argument(
        "--slow", type=float, default=SLOW_S, help="seconds that a request may take at most"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "cluster")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    say = partial(print, flush=True)
    choice = Choice(split_words(options.without), split_words(options.only))
    try:
        cluster = connect(options.context)
        images = parse_images(options.images)
        run = Run(
            cluster,
            secrets.token_hex(3),
            images,
            options.node_down,
            options.node_up,
            options.settle,
            options.slow,
        )
        report = run_all(run, options.output, choice, say)
    except ClusterError as exc:
        say(f"{exc}")
        return UNUSABLE
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    say(f"\n{format_table(report.outcomes)}")
    return int(report.has_violations)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
