"""The recipes of docs/operate/tokens.md: their settings, their rules, and what their commands print."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme

from tests.capabilities.identity.support.issuer import Issuer, serving_issuer
from tests.support.certificates import server_context, write_pair
from tests.support.documents import TOKENS, examples, matches
from tests.support.fake_triton import fake_triton
from tests.support.servers import Command, free_ports

OIDC = "## Tokens of an OpenID provider"
KEYCLOAK = "**Recipe: Keycloak.**"
KUBERNETES = "**Recipe: Kubernetes service accounts.**"
CERTIFICATES = "## Client certificates"
OWN_AUTHORITY = "**Recipe: an authority of your own.**"
POD = "/var/run/secrets"


@dataclass(frozen=True)
class Recipe:
    text: str
    settings: Mapping[str, str]
    rules: str
    commands: list[tuple[str, str]]


def read_recipe(folder: Path, start: str, end: str, **places: str) -> Recipe:
    """Return what the section from `start` to `end` says, with other places."""
    text = TOKENS.read_text().partition(start)[2].partition(end)[0]
    for name, place in places.items():
        text = text.replace(PLACES[name], place)
    document = folder / "recipe.md"
    document.write_text(text)
    settings = dict(re.findall(r"^(GATEWAY_\w+)=(\S+)$", text, re.MULTILINE))
    (rules, *_) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    commands = [(command, answer) for _, command, answer in examples([document])]
    return Recipe(text, settings, rules, commands)


PLACES = {
    "keycloak": "https://login.example.com/realms/prod",
    "cluster": "https://kubernetes.default.svc.cluster.local",
    "pod": POD,
}


@contextmanager
def served(folder: Path, recipe: Recipe) -> Iterator[int]:
    """Serve with the settings and rules of a recipe, and yield the port."""
    (folder / "keys.yaml").write_text(recipe.rules)
    (port,) = free_ports(1)
    with fake_triton() as triton:
        environment = {
            "GATEWAY_TRITON_URLS": f"http://127.0.0.1:{triton.port}",
            "GATEWAY_KEYS_FILE": "keys.yaml",
            **recipe.settings,
        }
        serve = ("serve", "--port", str(port))
        with Command(*serve, environment=environment, folder=folder) as command:
            command.wait_for("serving")
            yield port


def assert_prints(folder: Path, port: int, commands: Sequence[tuple[str, str]]) -> None:
    """Run the commands in one shell: each prints what the document says."""
    separator = "--- next command"
    script = f"\necho '{separator}'\n".join(command for command, _ in commands)
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script.replace("localhost:8080", f"localhost:{port}")],
        cwd=folder,
        env={**os.environ, "SECRET": "secret"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    printed = run.stdout.split(f"{separator}\n")
    assert len(printed) == len(commands), run.stdout + run.stderr
    for (command, answer), output in zip(commands, printed, strict=True):
        assert matches(answer, output.strip()), f"{command}\n{output}"


def test_recipe_for_keycloak(tmp_path: Path) -> None:
    with serving_issuer() as issuer:
        recipe = read_recipe(tmp_path, OIDC, KUBERNETES, keycloak=issuer.url)
        assert len(recipe.commands) == 5
        with served(tmp_path, recipe) as port:
            assert_prints(tmp_path, port, recipe.commands)


def asks_for_a_token(issuer: Issuer) -> None:
    """Answer only with the token of a pod, as the API server of Kubernetes."""

    def answer(path: str) -> tuple[int, Mapping[str, str]] | None:
        _, headers = issuer.requests[-1]
        return None if headers.get("authorization", "").startswith("Bearer ey") else (401, {})

    issuer.answer = answer


def test_recipe_for_kubernetes_service_accounts(tmp_path: Path) -> None:
    authority = trustme.CA()
    account = tmp_path / "kubernetes.io" / "serviceaccount"
    mounted = tmp_path / "triton-gateway"
    for folder in (account, mounted):
        folder.mkdir(parents=True)
    authority.cert_pem.write_to_path(account / "ca.crt")
    context = server_context(authority, name="127.0.0.1", wants_client=False)
    with serving_issuer(context) as issuer:
        asks_for_a_token(issuer)
        claims: dict[str, Any] = {
            "sub": "system:serviceaccount:prod:writer",
            "kubernetes.io": {"namespace": "prod"},
        }
        (account / "token").write_text(issuer.sign(aud=[issuer.url], **claims))
        (mounted / "token").write_text(issuer.sign(aud=["triton-gateway"], **claims))
        recipe = read_recipe(
            tmp_path, KUBERNETES, CERTIFICATES, cluster=issuer.url, pod=str(tmp_path)
        )
        assert len(recipe.commands) == 2
        with served(tmp_path, recipe) as port:
            assert_prints(tmp_path, port, recipe.commands)


def test_recipe_for_client_certificates(tmp_path: Path) -> None:
    authority = trustme.CA()
    write_pair(authority, tmp_path, "localhost")
    authority.cert_pem.write_to_path(tmp_path / "server-ca.pem")
    recipe = read_recipe(tmp_path, CERTIFICATES, "\n## ")
    preparation = [(command, answer) for command, answer in recipe.commands if not answer]
    assert len(preparation) == 3
    assert_prints(tmp_path, 0, preparation)
    with served(tmp_path, recipe) as port:
        calls = recipe.commands[len(preparation) :]
        assert len(calls) == 4
        assert_prints(tmp_path, port, calls)
