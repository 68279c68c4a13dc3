"""The logs of all containers, kept in files: those of a pod that is deleted are gone."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.cluster.kubectl import Cluster, ClusterError
from tests.cluster.verdict import find_log_faults
from tests.support.manifests import Resource

if TYPE_CHECKING:
    from typing_extensions import Self

LOOK_PAUSE_S: Final = 1.0
END_TIMEOUT_S: Final = 5.0


class LogFiles:
    """A file for each container, which `kubectl logs --follow` writes, until the block ends."""

    def __init__(self, cluster: Cluster, folder: Path, namespaces: Sequence[str]) -> None:
        self._cluster = cluster
        self._folder = folder
        self._namespaces = namespaces
        self._followers: dict[Path, subprocess.Popen[bytes]] = {}
        self._read_bytes: dict[Path, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for follower in self._followers.values():
            follower.terminate()
            follower.wait(END_TIMEOUT_S)

    def _look(self) -> None:
        while not self._stop.wait(LOOK_PAUSE_S):
            # Namespaces come and go, and the API may be away for a moment.
            with suppress(ClusterError):
                for namespace in self._namespaces:
                    for pod in self._cluster.list_objects("pods", namespace):
                        self._follow(namespace, pod)

    def _follow(self, namespace: str, pod: Resource) -> None:
        name = pod["metadata"]["name"]
        for container in list_started_containers(pod):
            number = container["restartCount"]
            path = self._folder / f"{namespace}.{name}.{container['name']}.{number}.log"
            if path not in self._followers:
                self._followers[path] = self._cluster.follow_log(
                    namespace, name, container["name"], str(path)
                )

    def find_new_faults(self) -> list[str]:
        """Return the faults in what was written since the last call."""
        found: list[str] = []
        for path in sorted(self._followers):
            with path.open("rb") as file:
                file.seek(self._read_bytes.get(path, 0))
                text = file.read()
            self._read_bytes[path] = self._read_bytes.get(path, 0) + len(text)
            found += find_log_faults(path.stem, text.decode(errors="replace"))
        return found


def list_started_containers(pod: Resource) -> Iterator[Resource]:
    """Yield the statuses of the containers that have a log."""
    status = pod["status"]
    for container in [
        *status.get("initContainerStatuses", []),
        *status.get("containerStatuses", []),
    ]:
        if container["state"].keys() & {"running", "terminated"}:
            yield container
