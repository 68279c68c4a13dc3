"""Uploads and removals of models: changes of the repository's files, together with loads and unloads.

A change continues when its client disconnects: files and replicas must not disagree.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from typing import Any, TypeVar

from gateway.capabilities.uploads.model_files.model_upload import ModelUpload
from gateway.capabilities.uploads.model_files.store import ModelChange, ModelStore
from gateway.errors import Conflict, GatewayError, StateUnavailable, UnknownModel
from gateway.messages import quote_text
from gateway.repository.operations import PartialFailure
from gateway.repository.repository import Repository, VisibilityCheck
from gateway.repository.resolver import ModelResolver
from gateway.repository.state.interface import WRITE_ACTION
from gateway.tasks import TaskSet, cancel_tasks
from gateway.telemetry.request_info import record_change

T = TypeVar("T")
VersionChange = tuple[Collection[int], Collection[int]]  # the versions before and afterwards
UploadBuild = Callable[[bytes | None], ModelUpload]


class ModelPublisher:
    """Publishes uploaded versions and removes models, one change of a model at a time."""

    def __init__(self, files: ModelStore, repository: Repository, resolver: ModelResolver) -> None:
        self.files = files
        self._repository = repository
        self._resolver = resolver
        self._events = repository.state.events
        self._tasks = TaskSet()

    async def close(self) -> None:
        self.files.stop()
        await cancel_tasks(list(self._tasks))

    async def run(self, action: str, model: str, change: Coroutine[Any, Any, T]) -> T:
        """Return the result of a change, which goes on and is recorded if the client disconnects."""
        return await self._events.run_call(self._tasks, action, model, change)

    @asynccontextmanager
    async def _lock_files(self, model: str) -> AsyncIterator[None]:
        """Exclude other changes of the model's files, by all gateways that share the state.

        Raises `StateUnavailable`: gateways that cannot agree would write the same version.
        """
        state = self._repository.state
        async with state.wait_for_lease(f"files:{model}"):
            if not state.store.is_available:
                raise StateUnavailable(WRITE_ACTION, "it gives no lease of the model's files")
            yield

    async def publish(
        self, model: str, version: int | None, build: UploadBuild, *, load: bool
    ) -> ModelUpload:
        """Install the upload as this or the next version, and load the model; return it with its versions.

        `build` gets the existing config. If the load fails, the files are as before. Raises the error of
        the load, or of the file system.
        """
        files = self.files
        async with self._lock_files(model):
            existing_config = await files.run(files.read_config, model)
            built = await files.run(build, existing_config)
            existing = await files.run(files.list_versions, model)
            upload = built.assign_version(version, max(existing, default=0) + 1)
            is_replacing = not upload.versions.keys().isdisjoint(existing)
            async with self._repository.pause_loads(model) if is_replacing else nullcontext():
                change = await files.run(files.install, model, upload)
            versions = (existing, {*existing, *upload.versions})
            await self._apply(model, change, versions, load=load)
            return upload

    async def _apply(
        self, model: str, change: ModelChange, versions: VersionChange, *, load: bool
    ) -> None:
        try:
            if load:
                await self._repository.load(model, {})
        except PartialFailure:  # the gateway keeps retrying
            await self.files.run(change.commit)
            record_versions(model, versions)
            raise
        except GatewayError:
            await self._revert(model, change)
            raise
        except BaseException:
            change.revert()  # blocks the event loop: a cancelled task cannot wait for a thread
            raise
        await self.files.run(change.commit)
        record_versions(model, versions)

    async def _revert(self, model: str, change: ModelChange) -> None:
        """Revert a change that no replica could load; one that came back may be loading it now."""
        async with AsyncExitStack() as stack:
            with suppress(Conflict):
                await stack.enter_async_context(self._repository.pause_loads(model))
            await self.files.run(change.revert)
        with suppress(GatewayError):  # the caller gets the error of the load
            if not await self.files.run(self.files.has_model, model):
                await self._forget(model)

    async def _forget(self, model: str) -> None:
        """Forget a model that has no files any longer, so that its name is unknown."""
        await self._repository.forget(model)
        with suppress(GatewayError):
            await self._repository.read_indexes()

    async def remove_model(self, model: str, is_visible: VisibilityCheck) -> None:
        """Unload a model from every replica, and remove its files. Raises `UnknownModel` or `Conflict`."""
        files = self.files
        async with self._lock_files(model):
            if not await files.run(files.has_model, model):
                await self._repository.end_removal(model)
                return
            async with self._repository.pause_loads(model):
                pass  # a load may take longer than the wait, so this comes before any change
            with suppress(UnknownModel):  # the Tritons do not know it
                await self._repository.unload(model, {}, is_visible)
            await self._resolver.policy.forget_model(model)
            async with self._repository.pause_loads(model):
                versions = await files.run(files.list_versions, model)
                await files.run(files.remove_model, model)
            record_versions(model, (versions, ()))
            await self._forget(model)  # last, so that the call can be repeated after a kill

    async def remove_version(self, model: str, version: int) -> None:
        """Remove a version, and reload the model.

        Raises `UnknownModel`, or `Conflict` for the last one and while the model is being loaded.
        """
        files = self.files
        async with self._lock_files(model):
            versions = await files.run(files.list_versions, model)
            if version not in versions:
                raise UnknownModel(model, str(version))
            if len(versions) == 1:
                raise Conflict(
                    f"version {version} is the only one of model {quote_text(model)}; remove the model"
                )
            async with self._repository.pause_loads(model):
                change = await files.run(files.remove_version, model, version)
            changed = (versions, {*versions} - {version})
            await self._apply(model, change, changed, load=self._repository.is_wanted(model))


def record_versions(model: str, versions: VersionChange) -> None:
    record_change(f"versions of model {model}", *map(sorted, versions))
