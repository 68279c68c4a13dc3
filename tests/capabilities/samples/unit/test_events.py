"""The headers of an event, and the settings, without a gateway."""

from __future__ import annotations

import pytest

from gateway.capabilities.samples.capability import SampleSettings
from gateway.capabilities.samples.events import Attributes, encode_event_headers
from gateway.config.settings import read_settings
from gateway.messages import CommandError


def test_headers_have_attributes_in_ascii() -> None:
    attributes: Attributes = {"caller": 'a "ü" 5%', "statuscode": 200, "datacontenttype": "a/b"}
    assert encode_event_headers(attributes) == [
        (b"ce-caller", b"a%20%22%C3%BC%22%205%25"),
        (b"ce-statuscode", b"200"),
        (b"content-type", b"a/b"),
    ]


@pytest.mark.parametrize(
    "samples", ["collector", "ftp://host", "https://", "https://user:secret@host/", "file:///data"]
)
def test_address_that_is_no_sink_is_refused(samples: str) -> None:
    with pytest.raises(
        CommandError, match=r"^GATEWAY_SAMPLES cannot be .*: .*use https://"
    ) as error:
        read_settings(SampleSettings, samples=samples)
    assert "secret" not in str(error.value)
