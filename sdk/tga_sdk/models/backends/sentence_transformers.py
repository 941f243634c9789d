"""Embeddings of sentence-transformers."""

from __future__ import annotations

from typing import Any

from tga_sdk.models.loading import InThread, folder_of, import_of, plain
from tga_sdk.models.specs import SentenceTransformersModel


def load(spec: SentenceTransformersModel) -> InThread:
    library = import_of("sentence_transformers", extra="sentence-transformers")
    model = library.SentenceTransformer(
        folder_of(spec.path) or spec.model_name,
        revision=spec.revision,
        device=spec.device,
        local_files_only=spec.path is not None,
        trust_remote_code=False,
    )

    def predict(given: Any) -> Any:
        texts = [given] if isinstance(given, str) else given
        found = plain(
            model.encode(texts, normalize_embeddings=spec.normalize, convert_to_numpy=True, show_progress_bar=False)
        )
        return found[0] if isinstance(given, str) else found

    return InThread(predict)
