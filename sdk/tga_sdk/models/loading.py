"""Models are loaded once in a worker's process, when they are first used, and are kept.

Two predictions that want the same model at once load it once. A model is another one when its specification differs in
anything but `timeout`. A file that is exchanged while the worker runs is not noticed: start the worker again.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import io
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Protocol

from tga_sdk.errors import ExtraMissing, ModelRefused
from tga_sdk.models.specs import ModelSpecification


class LoadedModel(Protocol):
    """A model in memory."""

    async def predict(self, given: Any) -> Any:
        """Plain JSON data; what fails is raised, with `retryable` where the same may succeed later."""
        ...


class InThread:
    """A model whose `predict` blocks: it runs in a thread, one prediction of this model at a time."""

    def __init__(self, predict: Callable[[Any], Any]) -> None:
        self._predict = predict
        self._one_at_a_time = threading.Lock()

    async def predict(self, given: Any) -> Any:
        return await asyncio.to_thread(self._alone, given)

    def _alone(self, given: Any) -> Any:
        with self._one_at_a_time:
            return self._predict(given)


BACKENDS: Final[Mapping[str, str]] = {
    "http": "tga_sdk.models.backends.http",
    "sklearn": "tga_sdk.models.backends.sklearn",
    "onnx": "tga_sdk.models.backends.onnx",
    "sentence_transformers": "tga_sdk.models.backends.sentence_transformers",
    "transformers": "tga_sdk.models.backends.transformers",
    "torch": "tga_sdk.models.backends.torch",
    "sagemaker": "tga_sdk.models.backends.sagemaker",
}


class LoadedModels:
    """The models of this process, by specification. `loads` counts how often something was loaded."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._models: dict[str, Future[LoadedModel]] = {}
        self.loads = 0

    async def model(self, spec: ModelSpecification) -> tuple[LoadedModel, float]:
        """The model, and for how many seconds it was loaded just now (0.0: it was there).

        What cannot be loaded is raised, and tried again by the next one that asks.
        """
        key = spec.model_dump_json(exclude={"timeout"})
        with self._guard:
            found = self._models.get(key)
            mine = found is None
            if found is None:
                found = self._models[key] = Future()
        if not mine:
            return await asyncio.wrap_future(_apart(found)), 0.0
        begun = time.monotonic()
        # The thread goes on when who asked first is cancelled: others wait for the same model.
        threading.Thread(target=self._load, args=(spec, key, found), name=f"load {spec.type}", daemon=True).start()
        return await asyncio.wrap_future(_apart(found)), time.monotonic() - begun

    def _load(self, spec: ModelSpecification, key: str, found: Future[LoadedModel]) -> None:
        try:
            loaded = importlib.import_module(BACKENDS[spec.type]).load(spec)
        except BaseException as error:
            with self._guard:
                del self._models[key]
            found.set_exception(error)
            return
        with self._guard:
            self.loads += 1
        found.set_result(loaded)


def _apart(shared: Future[LoadedModel]) -> Future[LoadedModel]:
    """A future of its own for each that waits: cancelling it does not cancel what the others wait for."""
    own: Future[LoadedModel] = Future()

    def tell(done: Future[LoadedModel]) -> None:
        if not own.set_running_or_notify_cancel():
            return
        error = done.exception()
        if error is not None:
            own.set_exception(error)
        else:
            own.set_result(done.result())

    shared.add_done_callback(tell)
    return own


MODELS: Final = LoadedModels()


def import_of(module: str, *, extra: str) -> Any:
    """A package that comes with an extra of the SDK; ExtraMissing names the extra and the command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = getattr(error, "name", None) or module
        raise ExtraMissing(module=missing, extra=extra) from error


def bytes_of(path: str, sha256: str | None, *, needed_because: str | None) -> io.BytesIO:
    """A model's file, in memory, so that what was compared with the digest is what is loaded.

    `needed_because` says why a digest has to be stated; None: it need not.
    """
    try:
        found = Path(path).read_bytes()
    except OSError as error:
        raise ModelRefused(
            f"the model's file {path} cannot be read on this worker: {error.strerror}", retryable=True
        ) from error
    digest = hashlib.sha256(found).hexdigest()
    if sha256 is None and needed_because is not None:
        raise ModelRefused(
            f"{path} is loaded only when its digest is stated, because {needed_because}. If you trust this file, "
            f'add sha256="{digest}" to the specification'
        )
    if sha256 is not None and digest != sha256:
        raise ModelRefused(f"{path} is another file than is specified: expected sha256 {sha256}, found {digest}")
    return io.BytesIO(found)


def folder_of(path: str | None) -> str | None:
    """A folder that is there: a library would take another path for a name of the Hugging Face hub."""
    if path is not None and not Path(path).is_dir():
        raise ModelRefused(f"the model's folder {path} is not there on this worker", retryable=True)
    return path


def plain(found: Any) -> Any:
    """Arrays and tensors as lists, their numbers as Python's."""
    if isinstance(found, dict):
        return {str(name): plain(value) for name, value in found.items()}
    if isinstance(found, list | tuple):
        return [plain(value) for value in found]
    if hasattr(found, "detach"):
        found = found.detach().cpu()
    return found.tolist() if hasattr(found, "tolist") else found


def labelled(found: Any, labels: tuple[str, ...] | None) -> Any:
    """Class numbers, or rows of scores, as the words of `labels`."""
    if labels is None:
        return found
    if isinstance(found, list) and found and isinstance(found[0], list):
        return [labelled(row, labels) for row in found]
    if isinstance(found, list):
        found = max(range(len(found)), key=found.__getitem__)
    if isinstance(found, float) and found.is_integer():
        found = int(found)
    if not isinstance(found, int) or not 0 <= found < len(labels):
        raise ModelRefused(f"the model answered {found!r}, and the specification has {len(labels)} labels")
    return labels[found]
