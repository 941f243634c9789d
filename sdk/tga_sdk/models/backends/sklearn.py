"""Estimators of scikit-learn, from files of skops or joblib."""

from __future__ import annotations

from typing import Any

from tga_sdk.errors import ModelRefused
from tga_sdk.models.loading import InThread, bytes_of, import_of, labelled, plain
from tga_sdk.models.specs import SklearnModel


def load(spec: SklearnModel) -> InThread:
    estimator = _from_skops(spec) if spec.path.endswith(".skops") else _from_joblib(spec)
    if not hasattr(estimator, spec.method):
        raise ModelRefused(f"{spec.path} has a {type(estimator).__name__}, which has no method {spec.method}")

    def predict(given: Any) -> Any:
        is_one = isinstance(given, str) or not (given and isinstance(given, list) and isinstance(given[0], list | str))
        found = plain(getattr(estimator, spec.method)([given] if is_one else given))
        found = [labelled(one, spec.labels) for one in found]
        return found[0] if is_one else found

    return InThread(predict)


def _from_skops(spec: SklearnModel) -> Any:
    skops = import_of("skops.io", extra="sklearn")
    data = bytes_of(spec.path, spec.sha256, needed_because=None).getvalue()
    unknown = sorted(set(skops.get_untrusted_types(data=data)) - set(spec.trusted))
    if unknown:
        raise ModelRefused(
            f"{spec.path} has objects of types that skops does not know to be harmless: {', '.join(unknown)}. "
            "If you trust them, name them in `trusted`"
        )
    return skops.loads(data, trusted=list(spec.trusted))


def _from_joblib(spec: SklearnModel) -> Any:
    joblib = import_of("joblib", extra="sklearn")
    import_of("sklearn", extra="sklearn")
    because = "a joblib or pickle file executes what is in it (a file of skops does not)"
    return joblib.load(bytes_of(spec.path, spec.sha256, needed_because=because))
