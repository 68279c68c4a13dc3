"""The checks of `triton-gateway doctor`: what a gateway needs in this environment, and what to do."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import httpx

from gateway.access.keys import read_keys_content
from gateway.capabilities.capability import (
    FAILED,
    OK,
    WARNING,
    CheckStatus,
    Finding,
    describe_error,
)
from gateway.capabilities.installed import INSTALLED, MODEL_KEYS, RULE_PARSERS, SETTINGS
from gateway.client import GatewayError as ClientGatewayError
from gateway.client.transport import describe_os_error
from gateway.commands import tables
from gateway.commands.errors import translate_hints
from gateway.commands.resources import (
    describe_readiness,
    format_replica_row,
    format_state,
    read_readiness,
)
from gateway.commands.target import Target
from gateway.config.settings import (
    MIN_OPEN_FILES,
    Settings,
    describe_unknown_settings,
    read_settings,
)
from gateway.doctor.gpu import check_gpu
from gateway.embedded import installation
from gateway.embedded.options import CannotStart, check_port_free
from gateway.errors import GatewayError
from gateway.fleet.discovery import ReplicaSource, create_tls_context, parse_replica_source
from gateway.fleet.replica import ReplicaAddress
from gateway.listeners import join_host_port
from gateway.messages import CommandError, join_names
from gateway.repository.models_file import read_models_file
from gateway.repository.state.content import MODELS
from gateway.repository.state.places import open_configured_store

HTTP_TIMEOUT_S: Final = 2.0
RECOMMENDED_OPEN_FILES: Final = 4096
URLS_SETTING: Final = "GATEWAY_TRITON_URLS"


def run_checks(host: str, port: int) -> list[Finding]:
    logging.disable(logging.WARNING)  # the findings say the same
    findings = [*check_python(), *check_installation(), *check_gpu()]
    try:
        settings = read_settings(*SETTINGS)
    except CommandError as exc:
        settings = None
        findings.append(Finding("settings", FAILED, str(exc), "correct the variable"))
    if settings is not None:
        for check in SETTINGS_CHECKS:
            findings += check(settings)
        findings += check_port(settings, host, port)
    return [*findings, *check_open_files()]


def check_python() -> Iterator[Finding]:
    version = platform.python_version()
    try:
        installation.check_platform(platform.system(), platform.machine(), platform.libc_ver())
    except CommandError as exc:
        yield Finding("python", WARNING, f"Python {version}: {exc}", "up is unavailable")
    else:
        yield Finding("python", OK, f"Python {version}")


def check_installation() -> Iterator[Finding]:
    check = "embedded"
    cache = installation.cache_folder()
    folder = next(place for place in (cache, *cache.parents) if place.exists())
    try:
        installation.check_cache_path(cache)
        python = installation.find_models_python()
    except CommandError as exc:
        yield Finding(check, WARNING, str(exc), "serve does not need it")
        return
    missing = installation.list_missing_parts(python.version)
    if not missing:
        yield Finding(check, OK, f"the embedded Triton is complete in {cache}")
    elif not os.access(folder, os.W_OK | os.X_OK):
        message = f"the cache folder {cache} cannot be written"
        yield Finding(check, FAILED, message, "set TRITON_GATEWAY_CACHE")
    else:
        message = f"{join_names(missing)} not in {cache}"
        advice = "the first start of up downloads what is missing, at most 90 MB"
        yield Finding(check, WARNING, message, advice)


def check_open_files() -> Iterator[Finding]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < RECOMMENDED_OPEN_FILES:
        message = f"at most {hard} open files, and every request can need two"
        advice = f"raise the limit to {RECOMMENDED_OPEN_FILES} or more (ulimit -Hn, LimitNOFILE=)"
        status: CheckStatus = FAILED if hard < MIN_OPEN_FILES else WARNING
        yield Finding("open files", status, message, advice)
    else:
        limit = "no limit" if hard == resource.RLIM_INFINITY else f"up to {hard}"
        yield Finding("open files", OK, limit)


def check_setting_names(settings: Settings) -> Iterator[Finding]:
    del settings  # the environment has the names
    warnings = describe_unknown_settings(os.environ, *SETTINGS)
    for warning in warnings:
        yield Finding("settings", WARNING, warning)
    if not warnings:
        count = sum(name.upper().startswith("GATEWAY_") for name in os.environ)
        yield Finding("settings", OK, f"valid, {count} set in the environment")


def check_keys_file(settings: Settings) -> Iterator[Finding]:
    check = "keys file"
    path = settings.keys_file
    command = f"triton-gateway key create NAME --file {path or 'keys.yaml'}"
    if path is None:
        message = "not set: every client that reaches the gateway may use all models"
        yield Finding(check, OK, message, f"before others reach it: {command}")
        return
    try:
        count = len(read_keys_content(path, RULE_PARSERS).callers)
    except CommandError as exc:
        yield Finding(check, FAILED, str(exc), f"create it with: {command}")
        return
    advice = "" if count else f"add one: {command}"
    yield Finding(check, OK if count else WARNING, f"{path} contains {count} keys", advice)


def check_models_file(settings: Settings) -> Iterator[Finding]:
    check = "models file"
    path = settings.models_file
    if path is None:
        yield Finding(check, OK, "not set: no model is required for readiness")
        return
    try:
        models = read_models_file(path, MODEL_KEYS)
    except CommandError as exc:
        yield Finding(check, FAILED, str(exc), "correct the file, see docs/serve/fleet.md")
    else:
        yield Finding(check, OK, f"{path} declares {join_names(models)}")


def check_state(settings: Settings) -> Iterator[Finding]:
    check = "state"

    async def read() -> tuple[int, str]:
        try:
            return len(await store.read(MODELS)), await store.find_weakness()
        finally:
            await store.close()

    try:
        store = open_configured_store(settings)
        count, weakness = asyncio.run(read())
    except (CommandError, GatewayError) as exc:
        advice = "see GATEWAY_STATE in docs/reference/settings.md"
        yield Finding(check, FAILED, describe_error(exc), advice)
        return
    if weakness:
        yield Finding(check, WARNING, weakness, "set appendonly yes, and appendfsync always")
    else:
        yield Finding(check, OK, f"readable, with the desired state of {count} models")


def check_port(settings: Settings, host: str, port: int) -> Iterator[Finding]:
    try:
        check_port_free(host, port, "--port")
    except CannotStart as exc:
        scheme = "http" if settings.tls_cert_file is None else "https"
        address = f"{scheme}://{join_host_port(host, port)}"
        if is_gateway(address):
            yield Finding("port", OK, f"a gateway answers at {address}")
        else:
            message = f"{exc}; the server there is not a gateway"
            yield Finding("port", FAILED, message, "end it, or use another port")
    else:
        yield Finding("port", OK, f"port {port} is free")


def is_gateway(address: str) -> bool:
    try:
        answer = httpx.get(
            f"{address}/livez",
            timeout=HTTP_TIMEOUT_S,
            verify=False,  # noqa: S501 - nothing is sent, and the certificate may be for another name
            trust_env=False,
        )
        return bool(answer.json() == {"live": True})
    except (httpx.HTTPError, ValueError):
        return False


def check_replicas(settings: Settings) -> Iterator[Finding]:
    try:
        sources = [parse_replica_source(url) for url in settings.triton_urls]
        tls = create_tls_context(settings, sources)
    except (CommandError, OSError) as exc:
        yield Finding("triton", FAILED, str(exc), f"correct {URLS_SETTING}")
        return
    # Nobody has to run a Triton at the default address: up starts its own.
    is_default = "triton_urls" not in settings.model_fields_set
    unreachable: CheckStatus = WARNING if is_default else FAILED
    with httpx.Client(timeout=HTTP_TIMEOUT_S, verify=tls or False, trust_env=False) as client:
        for source in sources:
            try:
                addresses = asyncio.run(find_addresses(source))
            except (OSError, UnicodeError, CommandError) as exc:
                message = f"{source} cannot be resolved: {exc}"
                advice = f"correct the name in {URLS_SETTING}, or its DNS records"
                yield Finding("triton", unreachable, message, advice)
            else:
                for address in addresses:
                    yield ask_triton(client, address, unreachable)


async def find_addresses(source: ReplicaSource) -> Iterable[ReplicaAddress]:
    return [source] if isinstance(source, ReplicaAddress) else await source.find_addresses()


def ask_triton(client: httpx.Client, address: ReplicaAddress, unreachable: CheckStatus) -> Finding:
    scheme = "https" if address.tls else "http"
    try:
        answer = client.get(f"{scheme}://{address}/v2")
        version = answer.raise_for_status().json()["version"]
        ready = client.get(f"{scheme}://{address}/v2/health/ready").is_success
    except httpx.TransportError as exc:
        reason = describe_os_error(exc)
        advice = f"start Triton there, set {URLS_SETTING}, or use up, which starts one"
        return Finding("triton", unreachable, f"{address} cannot be reached: {reason}", advice)
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        message = f"{address} answers, but it is not a Triton"
        return Finding("triton", FAILED, message, f"correct {URLS_SETTING}")
    if not ready:
        message = f"{address}: Triton {version} is not ready"
        return Finding("triton", WARNING, message, "see the log of Triton")
    return Finding("triton", OK, f"{address}: Triton {version} is ready")


SETTINGS_CHECKS: Final[Sequence[Callable[[Settings], Iterable[Finding]]]] = (
    check_setting_names,
    check_keys_file,
    check_models_file,
    check_state,
    *(capability.check for capability in INSTALLED),
    check_replicas,
)


# A gateway elsewhere, whose environment only itself can see.


def ask_gateway(target: Target) -> Iterator[Finding]:
    """Ask a running gateway about itself, its replicas and models. Raises `UsageError`."""
    with target.connect(HTTP_TIMEOUT_S) as client:
        try:
            readiness = read_readiness(client)
            status: CheckStatus = OK if readiness["ready"] else FAILED
            yield Finding("readiness", status, describe_readiness(readiness))
            for replica in client.request("GET", "/v1/replicas")["replicas"]:
                address, state, *_, reason = format_replica_row(replica)
                status = OK if state == format_state("UP") else WARNING
                yield Finding("triton", status, f"{address} is {state}{reason and f': {reason}'}")
            yield from examine_models(client.request("GET", "/v1/models")["models"])
        except ClientGatewayError as exc:
            advice = "correct --url, or use --key with the key of an administrator"
            yield Finding("gateway", FAILED, translate_hints(str(exc)), advice)
        else:
            yield Finding("gateway", OK, f"a gateway answers at {target.url}")


def examine_models(models: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    for model in models:
        if "last_error" in model:
            yield Finding("models", WARNING, f"{model['name']}: {model['last_error']}")
    count = sum(model["ready"] for model in models)
    yield Finding("models", OK, f"{count} of {len(models)} are ready")


def print_findings(findings: Sequence[Finding], *, json: bool) -> None:
    if json:
        tables.print_json([finding.to_dict() for finding in findings])
        return
    rows = [
        (each.status, each.check, "; ".join(filter(None, (each.message, each.advice))))
        for each in findings
    ]
    tables.print_table(("STATUS", "CHECK", "FINDING"), rows)
    counts = Counter(each.status for each in findings)
    plural = "" if counts[WARNING] == 1 else "s"
    sys.stdout.write(
        f"{counts[OK]} ok, {counts[WARNING]} warning{plural}, {counts[FAILED]} failed\n"
    )
