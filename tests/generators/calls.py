"""One request of each kind with the client that openapi-python-client generated: `calls.py URL KEY`."""

import sys
from http import HTTPStatus
from io import BytesIO

from generated import AuthenticatedClient
from generated.api.inference import infer
from generated.api.jobs import get_job, list_jobs
from generated.api.management import list_events, load_model, unload_model
from generated.api.models import describe_model, list_models, list_replicas
from generated.models import (
    EventList,
    InferRequest,
    InferResponse,
    Job,
    JobList,
    LoadReport,
    Model,
    ModelList,
    ReplicaList,
)
from generated.types import File

MODEL = "single_BYTES"
client = AuthenticatedClient(base_url=sys.argv[1], token=sys.argv[2])

models = list_models.sync(client=client)
assert isinstance(models, ModelList)
assert MODEL in [model.name for model in models.models]

model = describe_model.sync(MODEL, client=client)
assert isinstance(model, Model)
assert model.name == MODEL

for body in (InferRequest(inputs="a text"), File(BytesIO(b"a text"))):
    result = infer.sync(MODEL, client=client, body=body)
    assert isinstance(result, InferResponse)
    assert result.model == MODEL

job = infer.sync(MODEL, client=client, body=InferRequest(inputs="a text"), prefer="respond-async")
assert isinstance(job, Job)
assert isinstance(get_job.sync(job.id, client=client), Job)
jobs = list_jobs.sync(client=client)
assert isinstance(jobs, JobList)
assert job.id in [each.id for each in jobs.jobs]

for change in (unload_model, load_model):
    report = change.sync(MODEL, client=client)
    assert isinstance(report, LoadReport), report

assert isinstance(list_events.sync(client=client), EventList)
assert isinstance(list_replicas.sync(client=client), ReplicaList)

missing = describe_model.sync_detailed("missing", client=client)
assert missing.status_code == HTTPStatus.NOT_FOUND
assert getattr(missing.parsed, "code", "") == "MODEL_NOT_FOUND"

denied = list_models.sync_detailed(client=AuthenticatedClient(base_url=sys.argv[1], token="wrong"))
assert denied.status_code == HTTPStatus.UNAUTHORIZED
