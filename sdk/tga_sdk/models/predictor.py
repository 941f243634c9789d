"""What `ctx.model(...)` gives a program: predictions that are recorded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from tga_sdk.errors import PredictionTimedOut
from tga_sdk.models.loading import MODELS
from tga_sdk.models.specs import HttpModel, ModelSpecification, SagemakerModel, specification


class Performs(Protocol):
    """What a predictor needs of a run's context."""

    async def perform(self, kind: str, name: str, fn: Callable[[], Awaitable[Any]], **options: Any) -> Any: ...

    def log(self, message: str) -> None: ...


class Predictor:
    """A model, under a name of the program's.

    `await predictor.predict(x)` is one checkpoint of kind `model` under this name: the prediction is recorded with the
    time it took, and a replay returns it without loading or asking anything. What the model is, and the input, decide
    what the operation is: with another specification or input at the same place a replay says RUN_DIVERGED.

    Not guaranteed: that a prediction is computed once. One that was under way when the worker died is computed again
    (and, by a service that charges for it, charged again).
    """

    def __init__(
        self,
        ctx: Performs,
        name: str,
        spec: ModelSpecification | dict[str, Any],
        *,
        type: Any = None,  # noqa: A002
        retry: Any = None,
        timeout: float | None = None,
    ) -> None:
        self.name = name
        self.spec = specification(spec, name=name)
        self._ctx = ctx
        self._type = type
        self._retry = retry if retry is not None else _usual_retries(self.spec)
        self._timeout = timeout if timeout is not None else self.spec.timeout

    async def predict(
        self,
        given: Any,
        *,
        type: Any = None,  # noqa: A002
        retry: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """The model's answer to one input: plain data, or a value of `type`, which is checked.

        What fails for good is a StepError whose `type` is ModelRefused, PredictionFailed, PredictionTimedOut,
        ExtraMissing, or whatever the library raised; what may succeed later is tried again first, as `retry` says
        (services: twice; models in this process: not). `timeout` is in seconds, and of each try.
        """
        seconds = timeout if timeout is not None else self._timeout

        async def body() -> Any:
            return await self._predict(given, seconds)

        return await self._ctx.perform(
            "model",
            self.name,
            body,
            given={"model": self.spec.model_dump(mode="json", exclude={"timeout"}), "input": given},
            retry=retry if retry is not None else self._retry,
            type=type if type is not None else self._type,
        )

    async def _predict(self, given: Any, seconds: float | None) -> Any:
        model, loaded_in = await MODELS.model(self.spec)
        begun = time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                found = await model.predict(given)
        except TimeoutError as error:
            raise PredictionTimedOut(f"model {self.name} did not answer within {seconds:g} s") from error
        took = time.monotonic() - begun
        loading = f", loaded in {loaded_in * 1000:.0f} ms" if loaded_in else ""
        self._ctx.log(f"model {self.name} ({self.spec.type}): predicted in {took * 1000:.1f} ms{loading}")
        return found


def _usual_retries(spec: ModelSpecification) -> int:
    return 2 if isinstance(spec, HttpModel | SagemakerModel) else 0
