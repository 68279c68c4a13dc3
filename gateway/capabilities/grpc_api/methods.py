"""The methods of the gRPC front end: a table of who may call them and who answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from gateway.capabilities.grpc_api import inference, models, repository
from gateway.capabilities.grpc_api.call import IncomingCall, MethodAccess
from gateway.capabilities.grpc_api.health import HEALTH_SERVICE, HealthService
from gateway.capabilities.grpc_api.reflection import REFLECTION_VERSIONS, serve_reflection
from gateway.triton.grpc.byte_channel import GRPC_SERVICE

UnaryHandler = Callable[[IncomingCall], Awaitable[bytes]]
StreamHandler = Callable[[IncomingCall], Awaitable[None]]


@dataclass(frozen=True)
class Method:
    access: MethodAccess
    serve: UnaryHandler | StreamHandler
    is_stream: bool = False  # `serve` writes the responses itself


# Methods of Triton's service with one request and one response.
TRITON_METHODS: Final[dict[str, UnaryHandler]] = {
    "ServerLive": partial(models.serve_server, is_health_check=True),
    "ServerMetadata": partial(models.serve_server, is_health_check=False),
    "ModelReady": models.serve_model_ready,
    "ModelMetadata": models.serve_model,
    "ModelConfig": models.serve_model,
    "ModelStatistics": models.serve_statistics,
    "ModelInfer": inference.serve_infer,
    "RepositoryIndex": repository.serve_index,
    "RepositoryModelLoad": repository.serve_load,
    "RepositoryModelUnload": repository.serve_unload,
    "TraceSetting": models.serve_trace_setting,
    "LogSettings": models.serve_log_settings,
    "SystemSharedMemoryStatus": models.serve_no_regions,
    "SystemSharedMemoryUnregister": models.serve_no_regions,
    "SystemSharedMemoryRegister": models.refuse_shared_memory,
    "CudaSharedMemoryStatus": models.serve_no_regions,
    "CudaSharedMemoryUnregister": models.serve_no_regions,
    "CudaSharedMemoryRegister": models.refuse_shared_memory,
}
UNLIMITED_METHODS: Final = frozenset(("ServerLive", "ServerReady"))
READ_METHODS: Final = frozenset(("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"))


def list_methods(health: HealthService) -> dict[str, Method]:
    """Return the methods by path, without `ModelStreamInfer`."""
    methods = {}
    for name, serve in {**TRITON_METHODS, "ServerReady": health.serve_server_ready}.items():
        path = f"{GRPC_SERVICE}/{name}"
        http_method = "GET" if name in READ_METHODS else "POST"
        is_unlimited = name in UNLIMITED_METHODS
        access = MethodAccess(path, is_unlimited=is_unlimited, http_method=http_method)
        methods[path] = Method(access, serve)
    check = f"/{HEALTH_SERVICE}/Check"
    watch = f"/{HEALTH_SERVICE}/Watch"
    methods[check] = Method(MethodAccess(check, is_public=True, is_unlimited=True), health.check)
    methods[watch] = Method(
        MethodAccess(watch, is_public=True, is_unlimited=True), health.watch, is_stream=True
    )
    for package in REFLECTION_VERSIONS:
        path = f"/{package}.ServerReflection/ServerReflectionInfo"
        methods[path] = Method(MethodAccess(path), serve_reflection, is_stream=True)
    return methods
