"""A real Redis that a test starts and stops."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote
from uuid import uuid4

import redis

from tests.support.guards import GuardedServer
from tests.support.missing import find_program
from tests.support.servers import free_ports


class RedisServer(GuardedServer):
    def __init__(self, folder: Path, *options: str) -> None:
        (port,) = free_ports(1)
        listens = () if "--tls-port" in options else ("--port", str(port))
        command = [
            *(
                find_program("redis-server"),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--appendonly",
                "no",
            ),
            *("--dir", str(folder), *listens),
            *(option.replace("PORT", str(port)) for option in options),
        ]
        super().__init__(port, command)

    def url(self, **options: str) -> str:
        """Return an address with a prefix of its own, so that tests share no keys."""
        query = "&".join(f"{name}={quote(value)}" for name, value in options.items())
        return f"redis://127.0.0.1:{self.port}/0?prefix={uuid4()}:&{query}".rstrip("&")

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port)
