"""`make chaos SEED=1 STEPS=50`: disturb and change a fleet, and compare it with what was acknowledged.

Two gateways with one Redis before three Tritons. The same seed gives the same choices. Ends with status 1 at
the first violation.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.chaos.answers import Violation
from tests.chaos.run import run

INTERRUPTED = 130


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--without", default="", help="words of faults and changes to leave out: upload,flush"
    )
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies all time limits")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    excluded = [word for word in options.without.split(",") if word]
    say = partial(print, flush=True)
    say(f"SEED={options.seed} STEPS={options.steps}")
    try:
        with tempfile.TemporaryDirectory(prefix="triton-gateway-chaos-") as folder:
            run(
                Path(folder),
                options.seed,
                options.steps,
                excluded=excluded,
                patience=options.patience,
                say=say,
            )
    except Violation as exc:
        say(f"violation: {exc}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
