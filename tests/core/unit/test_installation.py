"""Platforms without an embedded Triton are refused with the alternatives."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.embedded.installation import (
    CannotInstall,
    Installation,
    build_once,
    cache_folder,
    check_cache_path,
    check_platform,
    find_libpython,
    find_lock_file,
)

GLIBC = ("glibc", "2.36")


@pytest.mark.parametrize(
    ("system", "machine", "libc", "words"),
    [
        ("Darwin", "arm64", GLIBC, "Linux x86-64 only, not on Darwin arm64"),
        ("Linux", "aarch64", GLIBC, "Linux x86-64 only, not on Linux aarch64"),
        ("Linux", "x86_64", ("glibc", "2.31"), "glibc 2.35 or newer, not glibc 2.31"),
        ("Linux", "x86_64", ("", ""), "glibc 2.35 or newer, not this libc"),
    ],
)
def test_unsupported_platform_is_explained(
    system: str, machine: str, libc: tuple[str, str], words: str
) -> None:
    check_platform("Linux", "x86_64", GLIBC)
    with pytest.raises(CannotInstall, match=f"{words}.*Docker"):
        check_platform(system, machine, libc)


def test_missing_libpython_is_explained(tmp_path: Path) -> None:
    with pytest.raises(CannotInstall, match="apt-get install libpython3"):
        find_libpython([tmp_path])
    (tmp_path / "libpython3.12.so.1.0").touch()
    assert find_libpython([tmp_path / "other", tmp_path], "3.12") == tmp_path


@pytest.mark.parametrize(
    ("name", "odd"), [("my cache", "a space"), ("c\u00e2che", "\u00e2"), ("a(b)", r"\( and \)")]
)
def test_cache_path_with_unsupported_characters_is_explained(
    monkeypatch: pytest.MonkeyPatch, name: str, odd: str
) -> None:
    monkeypatch.setenv("TRITON_GATEWAY_CACHE", f"/{name}")
    with pytest.raises(CannotInstall, match=f"with {odd}; set TRITON_GATEWAY_CACHE"):
        check_cache_path(cache_folder())
    monkeypatch.setenv("TRITON_GATEWAY_CACHE", "/my-c@che")
    check_cache_path(cache_folder())


@pytest.mark.parametrize(
    ("inherited", "expected"),
    [("", "/py:/libs"), ("/usr/local/nvidia/lib64", "/py:/libs:/usr/local/nvidia/lib64")],
)
def test_embedded_triton_inherits_the_places_of_libraries(
    monkeypatch: pytest.MonkeyPatch, inherited: str, expected: str
) -> None:
    """Some machines find the driver of their GPU by this path only."""
    monkeypatch.setenv("LD_LIBRARY_PATH", inherited)
    installation = Installation(
        Path("/server"), Path("/libs"), Path("/backends"), Path("/bin"), Path("/py")
    )
    assert installation.environment()["LD_LIBRARY_PATH"] == expected


LOCKS = [
    "models.txt",
    "tritonserver.txt",
    "gateway.txt",
    "image.txt",
    "dev.txt",
    "peers.txt",
    "perf-analyzer.txt",
    "sentences.txt",
]


@pytest.mark.parametrize("name", LOCKS)
def test_lock_file_has_hashes_and_no_address(name: str) -> None:
    lock = find_lock_file(name).read_text()
    pins = [line for line in lock.splitlines() if "==" in line]
    assert pins
    assert lock.count("--hash=sha256:") >= len(pins)
    assert "://" not in lock


def test_build_counts_as_complete_when_it_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with build_once(folder) as (place, is_needed):
        assert is_needed
        place.mkdir()
        assert not list(place.iterdir())  # a process that is killed now leaves nothing to be used
    with build_once(folder) as (_, is_needed):
        assert not is_needed
