"""The file of keys as it changes, and the commands that change it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from gateway.access.keys import read_keys_file
from gateway.access.keys_editor import add_key, remove_key
from gateway.callers import Role
from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.fake_triton import ask
from tests.support.gateway_forks import run_gateway
from tests.support.keys import ADMIN, ENTRIES, INFER, bearer, entry, written
from tests.support.servers import ROOT, Command, free_ports, gateway
from tests.support.wait import wait_until

TEXT_MODELS = {"text_core", "text_ensemble", "text_postprocessing", "text_preprocessing"}


@contextmanager
def gateway_with(path: Path, url: str, **settings: str) -> Iterator[tuple[httpx.Client, Command]]:
    with gateway(url, keys_file=str(path), **settings) as pair:
        yield pair


def status(client: httpx.Client, key: str) -> int:
    return client.get("/v1/models", headers=bearer(key)).status_code


@pytest.mark.long
@pytest.mark.fault(
    "no key, a key of another role, a key that lacks a character, a key that is revoked"
)
def test_keys_file_that_changes_takes_effect_if_valid(
    demo_triton: EmbeddedTriton, tmp_path: Path
) -> None:
    path = written(tmp_path / "keys.yaml", ENTRIES)
    with gateway_with(path, demo_triton.options.url) as (client, command):
        assert status(client, INFER) == 200
        remove_key(path, "infer")
        wait_until(lambda: status(client, INFER) == 401)
        assert status(client, ADMIN) == 200
        path.write_text(f"keys: [{{name: {INFER!r}, sha256: '{INFER}', *broken")
        command.wait_for("stays in use")
        assert status(client, ADMIN) == 200
        path.unlink()
        command.wait_for("No such file")
        assert status(client, ADMIN) == 200
        written(path, [entry(INFER, "infer")])
        wait_until(lambda: status(client, INFER) == 200)
        assert status(client, ADMIN) == 401
        path.write_text("keys: []")
        wait_until(lambda: status(client, INFER) == 401)
        assert client.get("/livez").status_code == 200
        assert command.output.count("stays in use") == 2
        assert "tgw_" not in command.output


def test_keys_file_behind_a_replaced_link_is_read_again(
    demo_triton: EmbeddedTriton, tmp_path: Path
) -> None:
    for name, key in (("..1", INFER), ("..2", ADMIN)):
        (tmp_path / name).mkdir()
        written(tmp_path / name / "keys.yaml", [entry(key, "infer", name="same")])
    for name in ("..1", "..2"):
        os.utime(tmp_path / name / "keys.yaml", (1, 1))  # not even the time tells them apart
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "keys.yaml").symlink_to("..data/keys.yaml")
    with gateway_with(tmp_path / "keys.yaml", demo_triton.options.url) as (client, _):
        assert [status(client, key) for key in (INFER, ADMIN)] == [200, 401]
        (tmp_path / "..new").symlink_to("..2")
        (tmp_path / "..new").replace(tmp_path / "..data")
        wait_until(lambda: status(client, ADMIN) == 200)
        assert status(client, INFER) == 401


@pytest.mark.long
def test_keys_file_is_read_again_by_every_worker(
    demo_triton: EmbeddedTriton, tmp_path: Path
) -> None:
    path = written(tmp_path / "keys.yaml", ENTRIES)
    (port,) = free_ports(1)
    environment = {
        "GATEWAY_TRITON_URLS": demo_triton.options.url,
        "GATEWAY_KEYS_FILE": str(path),
    }
    arguments = ("serve", "--port", str(port), "--workers", "2")
    with Command(*arguments, environment=environment) as command:
        command.wait_for("serving")
        headers = [("X-API-Key", INFER)]

        def statuses() -> set[int]:
            """Return the statuses of new connections; the port is open before a worker is up."""
            return {ask(port, "GET", "/v1/models", headers).status for _ in range(20)}

        assert statuses() == {200}
        remove_key(path, "infer")
        wait_until(lambda: statuses() == {401})


def test_gateway_does_not_start_with_an_invalid_keys_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_bytes(b"keys: [\xff]")
    os.mkfifo(pipe := tmp_path / "pipe")
    with ExitStack() as stack:
        commands = {}
        for keys_file in (path, tmp_path / "none.yaml", tmp_path, pipe):
            environment = {"GATEWAY_KEYS_FILE": str(keys_file)}
            serve = Command("serve", "--port", str(*free_ports(1)), environment=environment)
            commands[keys_file] = stack.enter_context(serve)
        for keys_file, command in commands.items():
            assert command.end() == 1
            assert command.output.startswith(f"triton-gateway: the keys file {keys_file}: ")
            assert len(command.lines) == 1


def test_gateway_warns_if_it_is_open_to_every_address(
    demo_triton: EmbeddedTriton, tmp_path: Path
) -> None:
    path = written(tmp_path / "keys.yaml", ENTRIES)
    with ExitStack() as stack:
        commands = {}
        for host, keys_file in (
            ("0.0.0.0", ""),
            ("0.0.0.0", str(path)),
            ("127.0.0.1", ""),
            ("localhost", ""),
        ):
            environment = {"GATEWAY_TRITON_URLS": demo_triton.options.url}
            if keys_file:
                environment["GATEWAY_KEYS_FILE"] = keys_file
            arguments = ("serve", "--host", host, "--port", str(*free_ports(1)))
            command = stack.enter_context(Command(*arguments, environment=environment))
            commands[host, keys_file] = command
        for command in commands.values():
            command.wait_for("serving")
            command.wait_for(" is UP")  # the first state of its replica
    for (host, keys_file), command in commands.items():
        warnings = command.output.count("GATEWAY_KEYS_FILE")
        assert warnings == (host == "0.0.0.0" and not keys_file), (host, keys_file)


def key_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_gateway("key", *arguments, environment={**os.environ, **environment})


def test_key_command_creates_lists_and_revokes_keys(
    demo_triton: EmbeddedTriton, tmp_path: Path
) -> None:
    path = tmp_path / "keys.yaml"
    rate = ("--requests-per-second", "2.5")
    made = key_command(
        "create", "shop", "--role", "infer", "--model", "text_*", *rate, "--file", str(path)
    )
    assert made.returncode == 0, made.stderr
    key = made.stdout.strip()
    assert key.startswith("tgw_")
    assert len(key) == 47
    assert key not in made.stderr
    assert key not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert not [other for other in tmp_path.iterdir() if other != path]
    admin = key_command("create", "ops", "--role", "admin", GATEWAY_KEYS_FILE=str(path))
    listed = key_command("list", "--file", str(path))
    assert [line.split()[:3] for line in listed.stdout.splitlines()[1:]] == [
        ["shop", "infer", "text_*"],
        ["ops", "admin", "*"],
    ]
    assert "2.5" in listed.stdout
    for caller in read_keys_file(path).values():
        assert caller.digest.hex() not in listed.stdout
    with gateway_with(path, demo_triton.options.url) as (client, _):
        found = client.get("/v2/models", headers=bearer(key)).json()["models"]
        assert set(found) == TEXT_MODELS
        assert status(client, admin.stdout.strip()) == 200
        assert key_command("revoke", "shop", "--file", str(path)).returncode == 0
        wait_until(lambda: status(client, key) == 401)


def test_key_command_rotates_and_ends_keys(tmp_path: Path) -> None:
    file = ("--file", str(tmp_path / "keys.yaml"))
    limits = ("--requests-per-day", "100", "--max-inflight", "4", "--expires", "90d")
    assert key_command("create", "shop", *limits, *file).returncode == 0
    failed = key_command("rotate", "shop", "--overlap", "soon", *file)
    assert failed.returncode == 2
    assert "'soon' is neither a time" in failed.stderr
    failed = key_command("create", "late", "--expires", "2020-01-01T00:00:00Z", *file)
    assert failed.returncode == 2
    assert "has passed" in failed.stderr
    rotated = key_command(
        "rotate", "shop", "--overlap", "7d", "--expires", "2999-01-01T00:00:00Z", *file
    )
    assert rotated.stdout.startswith("tgw_")
    assert key_command("expire", "shop", "--at", "2998-01-01T00:00:00Z", *file).returncode == 0
    first, second = key_command("list", *file).stdout.splitlines()[1:]
    assert first.split()[:-1] == ["shop", "infer", "*", "unlimited", "100", "4"]
    assert second.split() == ["shop", "infer", "*", "unlimited", "100", "4", "2998-01-01T00:00:00Z"]


@pytest.mark.long
def test_key_command_that_fails_prints_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    add_key(path, "shop", [Role.infer], ["*"])
    before = path.read_text()
    broken = tmp_path / "broken.yaml"
    broken.write_text("keys: [tgw_infer-secret")
    for arguments, words in (
        (("create", "shop", "--file", str(path)), "key 'shop' already exists"),
        (("create", "a b", "--file", str(path)), "the name of the new key"),
        (("create", "tgw_x", "--file", str(path)), "the name of the new key"),
        (("create", "x", "--requests-per-second", "0", "--file", str(path)), "above 0"),
        (("create", "x", "--model", "", "--file", str(path)), "the models of"),
        (("create", "x", "--file", str(tmp_path / "no" / "k.yaml")), "No such file"),
        (("create", "x", "--file", str(broken)), "invalid YAML"),
        (("create", "x", "--file", str(tmp_path)), "Is a directory"),
        (("create", "x"), "no keys file"),
        (("revoke", "nobody", "--file", str(path)), "key 'nobody' not found"),
        (("revoke", "x", "--file", str(broken)), "invalid YAML"),
        (("list", "--file", str(tmp_path / "none")), "No such file"),
        (("list", "--file", str(broken)), "invalid YAML"),
    ):
        run = key_command(*arguments)
        assert run.returncode == 1, arguments
        assert run.stderr.startswith("triton-gateway: "), run.stderr
        assert words in run.stderr
        assert run.stderr.count("\n") == 1
        assert "tgw_infer" not in run.stderr
        assert run.stdout == ""
    assert path.read_text() == before
    assert broken.read_text() == "keys: [tgw_infer-secret"


def test_keys_that_are_added_concurrently_are_all_kept(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real = tmp_path / "real" / "keys.yaml"
    link = tmp_path / "keys.yaml"
    link.symlink_to(real)
    code = (
        "import sys; from pathlib import Path; from gateway.access.keys_editor import add_key\n"
        "from gateway.callers import Role\n"
        "for n in range(10): add_key(Path(sys.argv[1]), f'{sys.argv[2]}-{n}', [Role.infer], ['*'])"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(link), str(number)], cwd=ROOT)
        for number in range(2)
    ]
    assert [process.wait(60) for process in running] == [0] * 2
    assert link.is_symlink()
    assert {caller.name for caller in read_keys_file(real).values()} == {
        f"{number}-{n}" for number in range(2) for n in range(10)
    }
