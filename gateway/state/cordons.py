"""The replicas that get no new requests, as the stores keep them."""

from __future__ import annotations

import orjson

from gateway.state.desired import UnreadableState, decode_state


def with_cordon(cordons: frozenset[str], replica: str, *, is_cordoned: bool) -> frozenset[str]:
    return cordons | {replica} if is_cordoned else cordons - {replica}


def encode_cordons(cordons: frozenset[str]) -> bytes:
    return orjson.dumps(sorted(cordons), option=orjson.OPT_APPEND_NEWLINE)


def parse_cordons(raw: bytes) -> frozenset[str]:
    """Raise `UnreadableState` if the document is invalid."""
    document = decode_state(raw)
    if not isinstance(document, list) or not all(isinstance(name, str) for name in document):
        raise UnreadableState("unexpected structure")
    return frozenset(document)
