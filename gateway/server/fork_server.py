"""The imports and signals of the process that workers are forked from; only that process imports this module.

It has imported everything that a worker needs and runs no thread, so that a fork is safe, takes milliseconds,
and shares the memory of the imports.
"""

from __future__ import annotations

import gc
import os
import signal
from functools import partial
from importlib import import_module
from typing import Final

# `multiprocessing` imports the module of the command, `gateway.__main__`, in every worker.
SHARED_MODULES: Final = ("gateway.app", "gateway.cli", "gateway.server.workers")
# A terminal or a service manager sends these signals to every process. It is the supervisor that stops the
# workers, and it learns from this process how they exited.
IGNORED_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

for number in IGNORED_SIGNALS:  # first, because the imports take a while
    previous = signal.signal(number, signal.SIG_IGN)
    os.register_at_fork(after_in_child=partial(signal.signal, number, previous))
gc.disable()  # Imports create hardly any garbage.
for name in SHARED_MODULES:
    import_module(name)
gc.enable()
gc.freeze()  # A collection in a worker would write to, and so copy, the pages of all these objects.
