"""Any client of Triton works unmodified: its calls have the outcomes that they have on a real Triton."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from gateway.embedded.supervisor import EmbeddedTriton
from tests.clients.comparison import (
    CLIENTS,
    OTHERS,
    OWN,
    AllowedDifference,
    Client,
    find_differences,
    find_used_rows,
    read_allowed_differences,
    run_client,
)
from tests.clients.programs.outcomes import Target
from tests.clients.servers import gateway_target, running_triton, triton_target
from tests.support.documents import INTERPRETERS, python_programs
from tests.support.keys import ENTRIES, written
from tests.support.missing import format_reason
from tests.support.servers import ROOT

DOCUMENT = ROOT / "docs/use/clients.md"
# What `make test` runs, with one replica.
# Without loads that fail: about one of a hundred ends Triton itself (2.51).
USUAL_CALLS = r"(?:http|grpc): (?!load unknown|load with)"
QUICK = {"tritonclient": USUAL_CALLS, "oldest tritonclient": USUAL_CALLS, "grpcio": ""}


Servers = Mapping[str, Target]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clients")


@pytest.fixture(scope="module")
def keys_file(folder: Path) -> str:
    return str(written(folder / "keys.yaml", ENTRIES))


@pytest.fixture(scope="module")
def triton(folder: Path) -> Iterator[EmbeddedTriton]:
    with running_triton(folder / "first") as triton:
        yield triton


@pytest.fixture(scope="module")
def one_replica(triton: EmbeddedTriton, keys_file: str) -> Iterator[Servers]:
    with gateway_target(triton.options.url, keys_file=keys_file) as one:
        yield {"Triton": triton_target(triton), "one replica": one}


@pytest.fixture(scope="module")
def two_replicas(
    folder: Path, triton: EmbeddedTriton, keys_file: str
) -> Iterator[tuple[Servers, Servers]]:
    """Gateways before two Tritons: with keys, and without them."""
    with (
        running_triton(folder / "second") as second,
        gateway_target(triton.options.url, second.options.url, keys_file=keys_file) as with_keys,
        gateway_target(triton.options.url, second.options.url) as without_keys,
    ):
        reference = triton_target(triton)
        yield (
            {"two replicas": with_keys},
            {"Triton": reference, "two replicas": without_keys},
        )


def compare(client: Client, servers: Servers, calls: str = "") -> set[AllowedDifference]:
    """Compare the client's calls on all servers; return the allowed differences that were seen."""
    if not client.is_installed:
        pytest.skip(format_reason(client.name, "make clients"))
    allowed = read_allowed_differences()
    first = 0 if client.is_known_to_triton else 1
    names = list(servers)[first:]
    reference, *seen = run_client(client, [servers[name] for name in names], calls)
    assert len(reference) >= 7
    differences = [
        str(difference)
        for name, outcomes in zip(names[1:], seen, strict=True)
        for difference in find_differences(reference, outcomes, name, allowed)
    ]
    assert not differences, "\n".join(differences)
    return set().union(*(find_used_rows(reference, each, allowed) for each in seen))


@pytest.mark.parametrize(
    "client", [each for each in CLIENTS if each.name in QUICK], ids=lambda each: each.name
)
def test_usual_calls_of_a_client_have_the_outcomes_of_triton(
    client: Client, one_replica: Servers
) -> None:
    compare(client, one_replica, QUICK[client.name])


@pytest.mark.long
def test_all_calls_of_all_clients_have_the_outcomes_of_triton(
    one_replica: Servers, two_replicas: tuple[Servers, Servers], subtests: pytest.Subtests
) -> None:
    """Each documented difference is seen as well."""
    two_with_keys, without_keys = two_replicas
    used: set[AllowedDifference] = set()
    for client in CLIENTS:
        with subtests.test(client.name):
            with_keys = {**one_replica, **two_with_keys}
            used |= compare(client, with_keys if client.sends_key else without_keys)
    unused = set(read_allowed_differences()) - used
    assert not unused or not all(client.is_installed for client in CLIENTS), unused


@pytest.mark.long
def test_programs_of_the_document_print_their_comments(
    demo_triton: EmbeddedTriton, subtests: pytest.Subtests
) -> None:
    programs = python_programs(DOCUMENT)
    assert len(programs) >= 7
    (javascript,) = re.findall(r"^```js\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    with gateway_target(demo_triton.options.url) as target:
        for program in [*programs, javascript]:
            expected = re.findall(r"(?:#|//) (.*)$", program, re.MULTILINE)[-1]
            source = program.replace("localhost:8080", target.http)
            source = source.replace("localhost:8001", target.grpc)
            command = [*interpreter_of(program), source]
            with subtests.test(program.splitlines()[-1]):
                if shutil.which(command[0]) is None:
                    pytest.skip(format_reason(command[0], "make clients"))
                run = subprocess.run(command, capture_output=True, text=True, timeout=60)
                assert run.stdout.strip() == expected, run.stderr


def test_allowed_difference_is_no_wider_than_its_row() -> None:
    row = AllowedDifference("404 NOT_FOUND: no TEXT", "503: TEXT is not ready; …", "")
    assert row.allows("404: no 'a'", "503: 'a' is not ready; load it")
    assert row.allows("None: no 'a'", "None: 'a' is not ready; wait")
    assert not row.allows("400: no 'a'", "503: 'a' is not ready; load it")
    assert not row.allows("404: no 'a'", "503: 'b' is not ready; load it")
    assert not row.allows("404: no 'a'", "404: 'a' is not ready; load it")
    missing = find_differences({"live": ["true"], "stream": []}, {}, "gateway", [row])
    assert [each.call for each in missing] == ["live", "stream"]


def interpreter_of(program: str) -> list[str]:
    if program.startswith("const "):
        return INTERPRETERS["JavaScript"]
    is_other = "kserve" in program or "pytriton" in program
    return [OTHERS if is_other else OWN, "-c"]
