"""The Python client of the gateway. It imports httpx, and nothing of the server; NumPy only to use arrays."""

from gateway.client.async_client import AsyncClient
from gateway.client.batches import InferOutcome
from gateway.client.bodies import Body
from gateway.client.client import Client
from gateway.client.errors import GatewayError
from gateway.client.models import ModelInfo, TensorInfo
from gateway.client.results import InferResult

__all__ = [
    "AsyncClient",
    "Body",
    "Client",
    "GatewayError",
    "InferOutcome",
    "InferResult",
    "ModelInfo",
    "TensorInfo",
]
