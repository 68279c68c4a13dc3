"""The states of a job, without a store."""

from __future__ import annotations

import pytest

from gateway.callers import Caller, CallerKind
from gateway.capabilities.jobs.errors import JobsFull, SubjectRequired
from gateway.capabilities.jobs.job import Job, JobState, encode_job, parse_job
from gateway.capabilities.jobs.service import find_owner
from gateway.telemetry.request_info import RequestInfo

NOW = 1000.0
QUEUED = Job(
    "1d" * 16,
    "key:team",
    "m",
    path="/v1/models/m/infer",
    query="",
    headers=(("accept", "*/*"),),
    client="127.0.0.1",
    request_id="one",
    caller="team",
    caller_id="team",
    body_bytes=3,
    body_digest="ab" * 32,
    request_digest="cd" * 32,
    created_at=NOW,
    callback_url="https://example.com/",
)


def test_each_change_has_the_next_token() -> None:
    running = QUEUED.start(NOW)
    states = [running.postpone(NOW), running.lose_worker(NOW, 30), running.cancel(NOW)]
    states += [running.expire(NOW), running.fail(NOW, JobsFull("no room"))]
    states += [running.finish(NOW, 200, [], 5)]
    assert {each.token for each in states} == {running.token + 1} == {QUEUED.token + 2}


@pytest.mark.parametrize(
    ("caller", "subject_id", "owner"),
    [
        (Caller("shop", id="shop"), "", "key:shop"),  # a key without an id
        (Caller("shop", id="5f3a"), "", "key:5f3a"),  # a new key with the name of a revoked one
        (Caller("users", kind=CallerKind.rule, id="rule"), "a1", "subject:a1"),
        (Caller("others", kind=CallerKind.rule, id="other"), "a1", "subject:a1"),
        (Caller("users", kind=CallerKind.rule, id="rule"), "b2", "subject:b2"),
        (Caller("", kind=CallerKind.anonymous), "", "network:10.0.0.7"),
    ],
)
def test_jobs_belong_to_an_identity_and_not_to_a_name(
    caller: Caller, subject_id: str, owner: str
) -> None:
    info = RequestInfo("id", subject="alice", subject_id=subject_id, caller_name="10.0.0.7")
    info.caller = caller
    assert find_owner(info) == owner


def test_token_that_names_nobody_has_no_jobs() -> None:
    info = RequestInfo("id")
    info.caller = Caller("users", kind=CallerKind.rule)
    with pytest.raises(SubjectRequired):
        find_owner(info)


def test_stored_job_is_the_same() -> None:
    headers = [("content-type", "application/json"), ("set-cookie", "a=b")]
    ended = QUEUED.start(NOW).finish(NOW, 422, headers, 5)
    assert parse_job(QUEUED.id.encode(), encode_job(ended)) == ended
    assert ended.response_headers == (("content-type", "application/json"),)
    assert ended.state is JobState.failed
    assert ended.result_file == f"{QUEUED.id}.1.result"
    assert ended.result_file in ended.files


def test_job_that_loses_its_worker_waits_and_then_fails() -> None:
    once = QUEUED.start(NOW).lose_worker(NOW, 30)
    twice = once.start(NOW).lose_worker(NOW, 30)
    thrice = twice.start(NOW).lose_worker(NOW, 30)
    assert (once.state, once.due_at) == (JobState.queued, NOW)
    assert (twice.state, twice.due_at) == (JobState.queued, NOW + 30)
    assert (thrice.state, thrice.error_code, thrice.starts) == (JobState.failed, "JOB_LOST", 3)
    assert thrice.callback_due_at == NOW
    assert not twice.callback_due_at
