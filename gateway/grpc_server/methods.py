"""The methods of the gRPC front end: a table of who may call them and who answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, NamedTuple

from gateway.grpc_server import inference, models, repository
from gateway.grpc_server.call import IncomingCall, MethodAccess
from gateway.grpc_server.health import HEALTH_SERVICE, HealthService
from gateway.grpc_server.reflection import REFLECTION_VERSIONS, ReflectionService
from gateway.triton.grpc.byte_channel import GRPC_SERVICE

UnaryHandler = Callable[[IncomingCall], Awaitable[bytes]]
StreamHandler = Callable[[IncomingCall], Awaitable[None]]


class UnaryMethod(NamedTuple):
    access: MethodAccess
    serve: UnaryHandler


class StreamMethod(NamedTuple):
    access: MethodAccess
    serve: StreamHandler


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


def list_unary_methods(health: HealthService) -> dict[str, UnaryMethod]:
    handlers = {**TRITON_METHODS, "ServerReady": health.serve_server_ready}
    methods = {}
    for name, serve in handlers.items():
        path = f"{GRPC_SERVICE}/{name}"
        http_method = "GET" if name in READ_METHODS else "POST"
        is_unlimited = name in UNLIMITED_METHODS
        access = MethodAccess(path, is_unlimited=is_unlimited, http_method=http_method)
        methods[path] = UnaryMethod(access, serve)
    check = f"/{HEALTH_SERVICE}/Check"
    methods[check] = UnaryMethod(
        MethodAccess(check, is_public=True, is_unlimited=True), health.check
    )
    return methods


def list_stream_methods(health: HealthService) -> dict[str, StreamMethod]:
    """Return the methods with several responses, without `ModelStreamInfer`."""
    watch = f"/{HEALTH_SERVICE}/Watch"
    methods = {
        watch: StreamMethod(MethodAccess(watch, is_public=True, is_unlimited=True), health.watch)
    }
    reflection = ReflectionService()
    for package in REFLECTION_VERSIONS:
        path = f"/{package}.ServerReflection/ServerReflectionInfo"
        methods[path] = StreamMethod(MethodAccess(path), reflection.serve)
    return methods
