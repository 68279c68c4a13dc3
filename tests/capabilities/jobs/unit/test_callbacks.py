"""One attempt of a callback, at a real receiver: what it is called with, and when it is not called at all."""

from __future__ import annotations

import ssl
import time
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import trustme
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from gateway.capabilities.jobs.callback_urls import CallbackUrls
from gateway.capabilities.jobs.callbacks import (
    DELAYS_S,
    MAX_JITTER,
    AttemptResult,
    CallbackClient,
    parse_retry_delay,
    record_attempt,
)
from gateway.capabilities.jobs.job import DELIVERED, Job
from gateway.webhooks import (
    InvalidSignature,
    build_headers,
    decode_secret,
    generate_secret,
    verify_callback,
)
from tests.capabilities.jobs.receiver import Receiver, answer, receiving
from tests.support.certificates import server_context, trusting

BODY = '{"type":"job.done","data":{"text":"ä"}}'.encode()
JOB = Job(
    id="0123456789abcdef0123456789abcdef", owner="shop", model="m", path="/v1/models/m/infer", query="",
    headers=(("traceparent", "00-1-2-01"), ("x-other", "1")), client="127.0.0.1", request_id="the-request",
    caller="shop", caller_id="shop", body_digest="", request_digest="", created_at=1.0,
)  # fmt: skip
SECRET = generate_secret()
TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # it trusts nobody


async def attempt(prefix: str, url: str, tls: ssl.SSLContext = TLS, **values: Any) -> AttemptResult:
    client = CallbackClient(CallbackUrls((prefix,)), tls)
    job = replace(JOB, callback_url=url, **values)
    return await client.send(job, build_headers([SECRET], job.id, BODY), BODY)


async def attempt_at(receiver: Receiver, *responses: bytes) -> AttemptResult:
    receiver.responses = list(responses)
    return await attempt(receiver.url, receiver.url)


async def test_receiver_gets_a_request_that_the_reference_library_verifies() -> None:
    old = generate_secret()
    async with receiving() as receiver:
        client = CallbackClient(CallbackUrls((receiver.url,)), TLS)
        job = replace(JOB, callback_url=f"{receiver.url}?a=%20b")
        result = await client.send(job, build_headers([SECRET, old], job.id, BODY), BODY)
    assert result == AttemptResult()
    (received,) = receiver.received
    assert received.request == "POST /done?a=%20b HTTP/1.1"
    headers = received.headers
    assert (headers["host"], headers["webhook-id"]) == (f"127.0.0.1:{receiver.port}", JOB.id)
    assert headers["content-type"] == "application/json"
    assert (headers["x-request-id"], headers["traceparent"]) == ("the-request", "00-1-2-01")
    assert not {"x-other", "cookie", "authorization"} & headers.keys()
    for secret in (SECRET, old):
        Webhook(secret).verify(received.body, headers)
        verify_callback(received.body, headers, [generate_secret(), secret])
    for other in (generate_secret(), SECRET):
        body = received.body + b" " * (other == SECRET)
        with pytest.raises(WebhookVerificationError):
            Webhook(other).verify(body, headers)
        with pytest.raises(InvalidSignature, match="no signature matches"):
            verify_callback(body, headers, [other])


def test_signature_of_another_time_is_refused() -> None:
    headers = build_headers([SECRET], JOB.id, BODY)
    verify_callback(BODY, headers, [SECRET])
    with pytest.raises(InvalidSignature, match=r"differs from now by \d+ s"):
        verify_callback(BODY, headers, [SECRET], tolerance_s=-1)
    with pytest.raises(InvalidSignature, match="no signature matches"):
        verify_callback(BODY, {**headers, "Webhook-Timestamp": "1"}, [SECRET])
    with pytest.raises(InvalidSignature, match="webhook-signature is missing"):
        verify_callback(BODY, {name: headers[name] for name in list(headers)[:2]}, [SECRET])


@pytest.mark.parametrize(
    "secret", ["", "whsec_", "whsec_!", "x" * 40, "whsec_" + "A" * 28, "whsec_" + "A" * 100]
)
def test_secret_that_is_too_short_or_too_long_is_refused(secret: str) -> None:
    with pytest.raises(ValueError, match="use whsec_ and 24 to 64 random bytes"):
        decode_secret(secret)


ENDLESS = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4000\r\n"
    + bytes(0x4000)
    + b"\r\n4000\r\n1"
)
STATUS = "the receiver answered with status"
FAILED = AttemptResult("the request failed: ")  # and a reason
# What a receiver answers: what becomes of the attempt. None of it is called a second time.
RESPONSES: dict[str, tuple[bytes, AttemptResult]] = {
    "200": (answer(200, body=b"ok"), AttemptResult()),
    "299": (answer(299), AttemptResult()),
    "a coding": (answer(200, "Content-Encoding: gzip", body=b"no gzip"), AttemptResult()),
    "an endless body": (ENDLESS, AttemptResult()),
    "410": (answer(410), AttemptResult(f"{STATUS} 410", is_final=True)),
    "503": (answer(503, "Retry-After: 90"), AttemptResult(f"{STATUS} 503", retry_after_s=90.0)),
    "404": (answer(404), AttemptResult(f"{STATUS} 404")),
    **{
        str(status): (
            answer(status, "Location: /other"),
            AttemptResult(f"{STATUS} {status}; redirects are not followed"),
        )
        for status in (301, 302, 303, 307, 308)
    },
    "nothing": (b"", FAILED),
    "ssh": (b"SSH-2.0-OpenSSH\r\n", FAILED),
    "a long header": (b"HTTP/1.1 200 OK\r\nX: " + bytes(200_000), FAILED),
    "garbage": (b"HTTP/1.1 200 OK\r\n" * 9, FAILED),
}


@pytest.mark.parametrize("name", RESPONSES)
async def test_response_decides(name: str) -> None:
    response, expected = RESPONSES[name]
    async with receiving() as receiver:
        result = await attempt_at(receiver, response)
    assert len(receiver.connections) == 1
    if expected is FAILED:
        assert result.problem.startswith(FAILED.problem)
        result = replace(result, problem=FAILED.problem)
    assert result == expected


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/done", "http://unknown.invalid/done"])
async def test_receiver_that_is_not_there_is_a_failure_that_is_repeated(url: str) -> None:
    result = await attempt(url, url)
    assert result.problem.startswith("the request failed: ")
    assert not result.is_final


async def test_trace_context_that_is_none_is_left_out() -> None:
    async with receiving() as receiver:
        headers = [["traceparent", "00-é"]]
        result = await attempt(receiver.url, receiver.url, headers=headers)
    assert result == AttemptResult()
    assert "traceparent" not in receiver.received[0].headers


async def test_proxy_and_passwords_of_the_environment_are_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("default login x password y\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    async with receiving() as receiver, receiving() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert await attempt_at(receiver, answer(200)) == AttemptResult()
    assert not proxy.connections
    assert "authorization" not in receiver.received[0].headers


@pytest.mark.parametrize(
    "suffix", ["2", "/../admin", "/%2e%2e/admin", "/..;/admin", "\\..\\admin", "%2f..%2fadmin"]
)
async def test_url_that_is_not_below_a_prefix_is_never_sent(suffix: str) -> None:
    """The list may have changed, or another program has written the job."""
    async with receiving() as receiver:
        result = await attempt(receiver.url, f"{receiver.url}{suffix}")
    assert not receiver.connections
    assert result.is_final
    assert result.problem.endswith(("is not allowed", "lists the prefixes of those that are"))


async def test_certificate_must_be_that_of_the_name() -> None:
    authority = trustme.CA()
    context = server_context(authority, name="localhost", wants_client=False)
    seen: list[str | None] = []

    def note_name(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        seen.append(name)

    context.sni_callback = note_name
    async with receiving(tls=context) as receiver:
        places = [f"{host}:{receiver.port}" for host in ("localhost", "127.0.0.1")]
        urls = [f"https://{each}/done" for each in places]
        results = [await attempt(each, each, trusting(authority)) for each in urls]
    assert results[0] == AttemptResult()
    assert "CERTIFICATE_VERIFY_FAILED" in results[1].problem
    assert seen == ["localhost", None]
    assert [each.headers["host"] for each in receiver.received] == places[:1]


def test_attempts_follow_the_schedule_until_it_ends() -> None:
    job = replace(JOB, callback_url="https://shop.example/", callback_due_at=1.0)
    failure = AttemptResult("the receiver answered with status 500")
    for attempts, delay_s in enumerate(DELAYS_S[1:], 1):
        job = record_attempt(job, failure, 1000.0)
        assert (job.callback_attempts, job.callback_outcome) == (attempts, failure.problem)
        assert delay_s <= job.callback_due_at - 1000.0 <= delay_s * MAX_JITTER
    assert record_attempt(job, failure, 1000.0).callback_due_at == 0
    assert record_attempt(JOB, AttemptResult("x", is_final=True), 1000.0).callback_due_at == 0
    assert record_attempt(JOB, AttemptResult("x", retry_after_s=99), 1000.0).callback_due_at == 1099
    delivered = record_attempt(job, AttemptResult(), 1000.0)
    assert (delivered.callback_due_at, delivered.callback_outcome) == (0, DELIVERED)


def test_retry_after_is_a_number_or_a_date() -> None:
    assert parse_retry_delay("120") == 120
    assert parse_retry_delay(formatdate(time.time() + 100, usegmt=True)) == pytest.approx(
        100, abs=30
    )
    assert parse_retry_delay("999999999") == 86400
    hostile = ("9" * 400, "9" * 5000, f"Mon, 01 Jan {'9' * 20} 00:00:00 GMT")
    for value in ("", "-1", "soon", "nan", formatdate(0), *hostile):
        assert parse_retry_delay(value) == 0
