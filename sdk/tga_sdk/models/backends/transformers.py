"""Pipelines of transformers."""

from __future__ import annotations

from typing import Any

from tga_sdk.errors import ModelRefused
from tga_sdk.models.loading import InThread, folder_of, import_of, plain
from tga_sdk.models.specs import TransformersModel


def load(spec: TransformersModel) -> InThread:
    import_of("torch", extra="transformers")
    library = import_of("transformers", extra="transformers")
    pipe = library.pipeline(
        spec.task,
        model=folder_of(spec.path) or spec.model_name,
        revision=spec.revision,
        device=spec.device,
        trust_remote_code=False,
        model_kwargs={"use_safetensors": True},
    )
    is_classification = spec.task in ("text-classification", "sentiment-analysis")
    if is_classification and spec.labels is not None:
        known = pipe.model.config.num_labels
        if known != len(spec.labels):
            raise ModelRefused(f"the model tells {known} classes apart; {len(spec.labels)} labels are specified")
        pipe.model.config.id2label = dict(enumerate(spec.labels))

    def predict(given: Any) -> Any:
        if not is_classification:
            return plain(pipe(given, **spec.options))
        texts = [given] if isinstance(given, str) else given
        found = plain(pipe(texts, **{"top_k": None if spec.scores else 1, **spec.options}))
        rows = [row if isinstance(row, list) else [row] for row in found]
        results = rows if spec.scores else [row[0]["label"] for row in rows]
        return results[0] if isinstance(given, str) else results

    return InThread(predict)
