"""What `ctx.model(...)` gives a program: predictions that are recorded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from tga_sdk.errors import PredictionTimedOut, TgaError
from tga_sdk.given import to_json
from tga_sdk.models.loading import MODELS
from tga_sdk.models.specs import HttpModel, ModelSpecification, SagemakerModel, specification
from tga_sdk.retry import Retry

if TYPE_CHECKING:
    from tga_sdk.context import Context


class Predictor:
    """A model, under a name of the program's.

    `await predictor.predict(x)` is one checkpoint of kind `model` under this name: the prediction is recorded with the
    time it took, and a replay returns it without loading or asking anything. The name and the input make it the same
    operation; the specification does not, so that a model may move or be replaced while runs are under way: what is
    recorded stands.

    Not guaranteed: that a prediction is computed once. One that was under way when the worker died is computed again
    (and, by a service that charges for it, charged again).
    """

    def __init__(
        self,
        ctx: Context[Any],
        name: str,
        spec: ModelSpecification | dict[str, Any],
        *,
        type: Any = None,  # noqa: A002
        retry: Retry | int | None = None,
        timeout: float | None = None,
    ) -> None:
        self.name = name
        self.spec = specification(spec, name=name)
        self._ctx = ctx
        self._type = type
        self._retry = Retry.of(retry if retry is not None else _usual_retries(self.spec))
        self._timeout = timeout if timeout is not None else self.spec.timeout

    async def predict(
        self,
        given: Any,
        *,
        type: Any = None,  # noqa: A002
        retry: Retry | int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """The model's answer to one input: plain data, or a value of `type`, which is checked.

        What fails is a StepError whose `type` is MODEL_REFUSED, PREDICTION_FAILED, PREDICTION_TIMED_OUT,
        EXTRA_MISSING, or the class of what the library raised; what may succeed later is tried again first, as `retry`
        says (services: twice; models in this process: not). `timeout` is in seconds, and of each try.
        """
        plain = to_json(given, where=f"the input of model {self.name}")
        seconds = timeout if timeout is not None else self._timeout
        again = self._retry if retry is None else Retry.of(retry)

        async def body() -> Any:
            return await self._predict(plain, seconds, again)

        return await self._ctx.perform(
            "model",
            self.name,
            body,
            given=plain,
            type=type if type is not None else self._type,
        )

    async def _predict(self, given: Any, seconds: float | None, retry: Retry) -> Any:
        """One prediction; what may succeed later is tried again here, within the one checkpoint."""
        tried = 0
        while True:
            tried += 1
            try:
                return await self._once(given, seconds)
            except TgaError as error:
                if not error.retryable or tried > retry.retries:
                    raise
                pause = retry.pause(tried)
                self._ctx.log(
                    f"model {self.name}: try {tried}: {error.message[:300]}; again in {pause:.1f} s", level="warning"
                )
            await asyncio.sleep(pause)

    async def _once(self, given: Any, seconds: float | None) -> Any:
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


class BlockingPredictor:
    """A `Predictor` for procedures that are plain functions: `predict` returns when the prediction is recorded."""

    def __init__(self, predictor: Predictor, do: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self.name = predictor.name
        self.spec = predictor.spec
        self._predictor = predictor
        self._do = do

    def predict(self, given: Any, **options: Any) -> Any:
        """See `Predictor.predict`."""
        return self._do(self._predictor.predict(given, **options))


def model_of(
    ctx: Context[Any],
    name: str,
    spec: ModelSpecification | dict[str, Any],
    *,
    type: Any = None,  # noqa: A002
    retry: Retry | int | None = None,
    timeout: float | None = None,
) -> Predictor:
    """`ctx.model(...)`: a model for this run, under a name of the program's. Nothing is loaded before it predicts.

    `type`: what predictions are, checked; `retry` and `timeout` (seconds, of one try): see `Predictor.predict`.
    """
    return Predictor(ctx, name, spec, type=type, retry=retry, timeout=timeout)


def _usual_retries(spec: ModelSpecification) -> int:
    return 2 if isinstance(spec, HttpModel | SagemakerModel) else 0
