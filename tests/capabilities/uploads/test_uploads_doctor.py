"""What `triton-gateway doctor` says of the repository."""

from __future__ import annotations

from pathlib import Path

from tests.support.doctor import examine
from tests.support.servers import free_ports


def test_doctor_checks_the_repository(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    triton_url = f"http://127.0.0.1:{port}"
    repository = {}
    for name in ("", "missing"):
        url = f"file://{tmp_path}/{name}".rstrip("/")
        status, found = examine(GATEWAY_TRITON_URLS=triton_url, GATEWAY_REPOSITORY=url)
        assert status == 1  # because of Triton
        assert list(found).index("state") < list(found).index("repository")
        repository[name] = found["repository"]
    assert repository[""] == {
        "check": "repository",
        "status": "ok",
        "message": f"{tmp_path} can be written",
    }
    assert repository["missing"]["status"] == "failed"
    assert repository["missing"]["message"] == f"{tmp_path}/missing is not a folder"
    assert repository["missing"]["advice"]
