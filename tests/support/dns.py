"""A DNS server with one name, or two, as a resolver of the gateway."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.fleet.discovery import DnsName
from gateway.fleet.replica import METRICS_PORT, ReplicaAddress

NAME = "tritons.example"
PREFERRED = "ready.tritons.example"


@dataclass
class DnsAnswers:
    """What the names lead to; the tests set it. Without `preferred`, there is one name."""

    hosts: list[str] = field(default_factory=list)
    preferred: list[str] | None = None
    error: OSError | None = None
    lookups: int = 0

    async def __call__(self, name: str) -> list[str]:
        self.lookups += 1
        if self.error is not None:
            raise self.error
        if name == PREFERRED:
            assert self.preferred is not None
            return self.preferred
        assert name == NAME
        return self.hosts

    def find_source(self, port: int, grpc_port: int, metrics_port: int = METRICS_PORT) -> DnsName:
        """Return the name for replicas with these ports."""
        preferred_name = "" if self.preferred is None else PREFERRED
        address = ReplicaAddress(NAME, port, grpc_port, metrics_port)
        return DnsName(address, preferred_name, resolver=self)
