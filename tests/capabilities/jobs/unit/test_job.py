"""The states of a job, without a store."""

from __future__ import annotations

from gateway.callers import Caller
from gateway.capabilities.jobs.errors import JobsFull
from gateway.capabilities.jobs.job import Job, JobState, decode_job, encode_job
from gateway.capabilities.jobs.service import find_owner
from gateway.telemetry.request_info import RequestInfo

NOW = 1000.0
QUEUED = Job(
    "id",
    "team",
    "m",
    path="/v1/models/m/infer",
    query="",
    headers=[["accept", "*/*"]],
    client="127.0.0.1",
    request_id="one",
    caller="team",
    key_digest="",
    body_bytes=3,
    body_digest="abc",
    created_at=NOW,
    callback_url="https://example.com/",
)


def test_each_change_has_the_next_token() -> None:
    running = QUEUED.start(NOW)
    states = [running.postpone(NOW), running.lose_worker(NOW, 30), running.cancel(NOW)]
    states += [running.expire(NOW), running.fail(NOW, JobsFull("no room"))]
    states += [running.finish(NOW, 200, [], 5)]
    assert {each.token for each in states} == {running.token + 1} == {QUEUED.token + 2}


def test_subjects_that_differ_own_different_jobs() -> None:
    owners = set()
    for subject in ("", "alice", "alice ", "alice\n"):
        info = RequestInfo("id", subject=subject)
        info.caller = Caller("users")
        owners.add(find_owner(info))
    assert len(owners) == 4


def test_stored_job_is_the_same() -> None:
    ended = QUEUED.start(NOW).finish(NOW, 422, [["content-type", "application/json"]], 5)
    assert decode_job(encode_job(ended)) == ended
    assert ended.state is JobState.failed
    assert ended.result_file == "id.1.result"
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
