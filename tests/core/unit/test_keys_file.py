"""The file of keys: what is refused, and changes that keep its comments."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from textwrap import indent

import pytest
import yaml

from gateway.access.keys import NO_RULES, BadKeysFile, parse_keys_content, read_keys_file
from gateway.access.keys_editor import add_key, expire_key, remove_key, rotate_key
from gateway.callers import CallerLimits, Role
from tests.support.keys import ADMIN, INFER, entry

GOOD = entry(INFER, "infer")


BAD: dict[str, str] = {
    "empty": "",
    "text": "keys",
    "no list": "keys: {a: b}",
    "another field": yaml.safe_dump({"keys": [GOOD], "more": 1}),
    "no object": "keys: [abc]",
    "an unknown field": yaml.safe_dump({"keys": [{**GOOD, "key": INFER}]}),
    "no name": yaml.safe_dump({"keys": [{**GOOD, "name": ""}]}),
    "a name of two lines": yaml.safe_dump({"keys": [{**GOOD, "name": "a\nb"}]}),
    "a key for a name": yaml.safe_dump({"keys": [{**GOOD, "name": INFER}]}),
    "a key for a hash": yaml.safe_dump({"keys": [{**GOOD, "sha256": INFER}]}),
    "no roles": yaml.safe_dump({"keys": [{**GOOD, "roles": []}]}),
    "an unknown role": yaml.safe_dump({"keys": [{**GOOD, "roles": ["root"]}]}),
    "roles as text": yaml.safe_dump({"keys": [{**GOOD, "roles": "infer"}]}),
    "no models": yaml.safe_dump({"keys": [{**GOOD, "models": []}]}),
    "a model that is none": yaml.safe_dump({"keys": [{**GOOD, "models": [1]}]}),
    "a rate of nothing": yaml.safe_dump({"keys": [{**GOOD, "requests_per_second": 0}]}),
    "a rate without end": yaml.safe_dump({"keys": [{**GOOD, "requests_per_second": float("inf")}]}),
    "a rate beyond floats": f"keys: [{{name: a, sha256: '{'0' * 64}', roles: [infer], "
    f"requests_per_second: 1{'0' * 400}}}]",
    "a rate that is true": yaml.safe_dump({"keys": [{**GOOD, "requests_per_second": True}]}),
    "a short secret": yaml.safe_dump({"keys": [{**GOOD, "callback_secrets": ["whsec_tgw_"]}]}),
    "a secret as text": yaml.safe_dump({"keys": [{**GOOD, "callback_secrets": "tgw_x"}]}),
    "a secret that is none": yaml.safe_dump({"keys": [{**GOOD, "callback_secrets": [1]}]}),
    "a quota of a half": yaml.safe_dump({"keys": [{**GOOD, "requests_per_day": 0.5}]}),
    "a quota that is true": yaml.safe_dump({"keys": [{**GOOD, "requests_per_month": True}]}),
    "no requests at once": yaml.safe_dump({"keys": [{**GOOD, "max_inflight": 0}]}),
    "an end without a zone": yaml.safe_dump({"keys": [{**GOOD, "expires": "2027-01-01T00:00:00"}]}),
    "an end that is a date": "keys: [{name: a, sha256: '%s', roles: [infer], expires: 2027-01-01}]"
    % ("0" * 64),
    "an end before the start": yaml.safe_dump(
        {
            "keys": [
                {**GOOD, "not_before": "2027-01-01T00:00:00Z", "expires": "2027-01-01T00:00:00Z"}
            ]
        }
    ),
    "two of one name": yaml.safe_dump({"keys": [GOOD, entry(ADMIN, "admin", name="infer")]}),
    "one key twice": yaml.safe_dump({"keys": [GOOD, entry(INFER, "admin", name="other")]}),
    "aliases": "keys: &a [*a]",
    "a field twice": "keys: []\nkeys: []",
    "no YAML": "keys: [tgw_infer-secret",
    "an object of Python": "keys: !!python/object/apply:os.system [tgw_infer-secret]",
    "a date that is none": "keys: [2020-13-45]",
    "very deep": "[" * 5000,
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD.keys())
def test_invalid_keys_file_is_refused_without_quoting_it(text: str) -> None:
    with pytest.raises(BadKeysFile) as caught:
        parse_keys_content(text, NO_RULES)
    sentence = str(caught.value)
    assert sentence
    assert "\n" not in sentence
    assert "tgw_" not in sentence
    assert GOOD["sha256"] not in sentence


@pytest.mark.parametrize("style", ["block", "flow"])
def test_rotated_keys_overlap_and_comments_stay(tmp_path: Path, style: str) -> None:
    path = tmp_path / "keys.yaml"
    ops = entry(ADMIN, "admin", name="ops")
    shop = entry(INFER, "infer", requests_per_day=5)
    shop_text = f"  - {json.dumps(shop)}\n"
    if style == "block":
        shop_text = indent(yaml.safe_dump([shop], sort_keys=False), "  ")
    path.write_text(f"keys:\n{shop_text}  # of the operators\n  - {json.dumps(ops)}\n# the end\n")
    first_end = datetime(2999, 1, 1, tzinfo=timezone.utc)
    key = rotate_key(path, "infer", first_end, None)
    callers = read_keys_file(path)
    old = callers[hashlib.sha256(INFER.encode()).digest()]
    new = callers[hashlib.sha256(key.encode()).digest()]
    assert (old.name, old.limits, old.expires) == (
        "infer",
        CallerLimits(requests_per_day=5),
        first_end,
    )
    assert new == replace(old, digest=new.digest, expires=None)
    assert path.read_text().count("#") == 2
    expire_key(path, "infer", first_end - timedelta(days=1))
    ends = [caller.expires for caller in read_keys_file(path).values() if caller.name == "infer"]
    assert ends == [first_end - timedelta(days=1)] * 2
    assert path.read_text().count("#") == 2
    with pytest.raises(BadKeysFile, match="say when the new one does, with --expires"):
        rotate_key(path, "infer", first_end, None)
    remove_key(path, "infer")
    assert [caller.name for caller in read_keys_file(path).values()] == ["ops"]


COMMENTED = """# Who may call, kept by hand.
keys:
    # the shop's
    - name: shop
      sha256: "{shop}"
      roles: [infer]   # and no more
      models: ["res*"]
    - {{name: ops, sha256: "{ops}", roles: [admin]}}
"""


def test_keys_file_keeps_its_comments(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    hashes = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("shop", "ops")}
    path.write_text(COMMENTED.format(**hashes))
    add_key(path, "new", [Role.infer, Role.metrics], ["a*", "b"], requests_per_second=3)
    text = path.read_text()
    assert text.startswith(COMMENTED.format(**hashes))
    assert [caller.name for caller in read_keys_file(path).values()] == ["shop", "ops", "new"]
    remove_key(path, "ops")
    assert [caller.name for caller in read_keys_file(path).values()] == ["shop", "new"]
    assert "# and no more" in path.read_text()
    remove_key(path, "new")
    remove_key(path, "shop")
    assert read_keys_file(path) == {}
