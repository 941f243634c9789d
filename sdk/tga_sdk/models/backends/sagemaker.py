"""Endpoints of SageMaker, through its runtime API."""

from __future__ import annotations

import json
from typing import Any

from tga_sdk.errors import PredictionFailed
from tga_sdk.models.loading import InThread, import_of
from tga_sdk.models.specs import SagemakerModel

REPEATED_CODES = frozenset({"ThrottlingException", "ServiceUnavailable", "InternalFailure", "ModelNotReadyException"})


class SagemakerEndpoint(InThread):
    """boto3's clients may be used by several threads at once, so predictions do not wait for each other."""

    def _alone(self, given: Any) -> Any:
        return self._predict(given)


def load(spec: SagemakerModel) -> SagemakerEndpoint:
    boto3 = import_of("boto3", extra="sagemaker")
    config = import_of("botocore.config", extra="sagemaker")
    errors = import_of("botocore.exceptions", extra="sagemaker")
    client = boto3.client(
        "sagemaker-runtime",
        region_name=spec.region,
        endpoint_url=spec.endpoint_url,
        # One request for each try: the prediction's own policy says how often it is tried.
        config=config.Config(read_timeout=spec.timeout or 60, connect_timeout=10, retries={"total_max_attempts": 1}),
    )
    fixed = {"EndpointName": spec.endpoint_name, "ContentType": spec.content_type, "Accept": spec.accept}
    if spec.target_model:
        fixed["TargetModel"] = spec.target_model

    def predict(given: Any) -> Any:
        is_json = spec.content_type == "application/json"
        body = json.dumps(given, ensure_ascii=False, allow_nan=False) if is_json else str(given)
        try:
            answer = client.invoke_endpoint(Body=body.encode(), **fixed)
            found = answer["Body"].read()
        except errors.ClientError as error:
            code = error.response["Error"]["Code"]
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            raise PredictionFailed(
                f"endpoint {spec.endpoint_name} answered {status} {code}: {error.response['Error']['Message']}",
                retryable=code in REPEATED_CODES or status in (429, 500, 502, 503, 504),
            ) from error
        except errors.BotoCoreError as error:
            raise PredictionFailed(
                f"endpoint {spec.endpoint_name} did not answer: {type(error).__name__}: {error}",
                retryable=isinstance(error, errors.HTTPClientError),
            ) from error
        text = found.decode()
        return json.loads(text) if "json" in answer.get("ContentType", "") else text

    return SagemakerEndpoint(predict)
