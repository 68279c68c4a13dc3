"""The Python client of the gateway. It imports httpx, and nothing of the server; NumPy only to use arrays."""

from gateway.client.async_client import AsyncClient
from gateway.client.bodies import Body
from gateway.client.client import Client
from gateway.client.errors import GatewayError
from gateway.client.jobs import Job
from gateway.client.many import InferOutcome
from gateway.client.models import ListedModel, ModelInfo, TensorInfo
from gateway.client.results import InferResult

__all__ = [
    "AsyncClient",
    "Body",
    "Client",
    "GatewayError",
    "InferOutcome",
    "InferResult",
    "Job",
    "ListedModel",
    "ModelInfo",
    "TensorInfo",
]
