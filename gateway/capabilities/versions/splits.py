"""The arithmetic of splits, without I/O: which version of several the next request gets."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from math import log
from typing import Final

HASH_RANGE: Final = 1 << 64


class WeightedRotation:
    """Smooth weighted round-robin, as in nginx.

    As many consecutive choices as the sum of the shares contain each version exactly as often as its share.
    """

    def __init__(self, shares: Mapping[str, int]) -> None:
        self._shares = shares
        self._total = sum(shares.values())
        self._balances = dict.fromkeys(shares, 0)

    def choose(self) -> str:
        balances = self._balances
        chosen = ""
        highest = -self._total
        for version, share in self._shares.items():
            balance = balances[version] = balances[version] + share
            if balance > highest:
                chosen = version
                highest = balance
        balances[chosen] -= self._total
        return chosen

    def return_choice(self, version: str) -> None:
        """Take back a choice, because the request got another version for a reason of its own."""
        for each, share in self._shares.items():
            self._balances[each] -= share
        self._balances[version] += self._total


def choose_version_by_key(shares: Mapping[str, int], key: str) -> str:
    """Return the version of a key: always the same one, and each for its share of the keys.

    If shares change, only keys of versions that lose a part of theirs change the version, because the hash
    of each version is independent of the others (weighted rendezvous hashing; C. Schindelhauer and
    G. Schomaker, Weighted Distributed Hash Tables, 2005).
    """
    return min(shares, key=lambda version: _weigh_hash(version, key) / shares[version])


def _weigh_hash(version: str, key: str) -> float:
    """Return a hash as an exponentially distributed number."""
    digest = blake2b(f"{version}\0{key}".encode(errors="surrogatepass"), digest_size=8).digest()
    return -log((int.from_bytes(digest, "big") + 0.5) / HASH_RANGE)


def find_largest_share(shares: Mapping[str, int]) -> str:
    return max(shares, key=lambda version: shares[version])
