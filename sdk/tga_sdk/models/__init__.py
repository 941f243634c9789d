"""Models for predictions: classifiers, extractors, embeddings. `ctx.model(name, spec)` gives a program a `Predictor`.

A prediction is one checkpoint of kind `model`: a replay returns what is recorded and loads no model.
"""

from tga_sdk.models.predictor import BlockingPredictor, Predictor, model_of
from tga_sdk.models.specs import (
    HttpModel,
    ModelSpecification,
    OnnxModel,
    SagemakerModel,
    SentenceTransformersModel,
    SklearnModel,
    TorchModel,
    TransformersModel,
    specification,
)

__all__ = [
    "BlockingPredictor",
    "HttpModel",
    "ModelSpecification",
    "OnnxModel",
    "Predictor",
    "SagemakerModel",
    "SentenceTransformersModel",
    "SklearnModel",
    "TorchModel",
    "TransformersModel",
    "model_of",
    "specification",
]
