"""Makes one call with a client and prints what the client shows of the response."""

import json
import sys

import grpc
import requests
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from requests.adapters import HTTPAdapter
from urllib3.util import Retry


def http(method, url, retry=None):
    with requests.Session() as session:
        if retry is not None:
            session.mount("http://", HTTPAdapter(max_retries=retry))
        try:
            response = session.request(method, url)
        except requests.exceptions.RetryError as error:
            return type(error).__name__
    return f"{response.status_code} {response.headers.get('retry-after', '-')}"


def unary(target, case, policy=None, timeout=None):
    options = []
    if policy is not None:
        config = {"methodConfig": [{"name": [{}], "retryPolicy": policy}]}
        options = [("grpc.service_config", json.dumps(config))]
    with grpc.insecure_channel(target, options) as channel:
        once = channel.unary_unary("/test.Echo/Once", lambda text: text, lambda text: text)
        try:
            once(b"\n\x02hi", metadata=[("x-case", case)], timeout=timeout)
            return "OK -"
        except grpc.RpcError as error:
            wait = "-"
            of_service = rpc_status.from_call(error)
            for detail in of_service.details if of_service else []:
                info = error_details_pb2.RetryInfo()
                if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
                    wait = f"RetryInfo {info.retry_delay.ToTimedelta().total_seconds():.0f}"
            return f"{error.code().name} {wait}"


RETRY_POLICY = {
    "maxAttempts": 4,
    "initialBackoff": "0.1s",
    "maxBackoff": "1s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["RESOURCE_EXHAUSTED", "UNAVAILABLE"],
}
client, url, case = sys.argv[1:]
print(
    {
        "requests": lambda: http("GET", url),
        "requests, `Retry(3)`": lambda: http("GET", url, Retry(3)),
        "requests, `Retry(3)`, `POST`": lambda: http("POST", url, Retry(3)),
        "requests, `Retry(3, allowed_methods=None)`, `POST`": lambda: http("POST", url, Retry(3, allowed_methods=None)),
        "requests, `Retry(3, retry_after_max=2)`": lambda: http("GET", url, Retry(3, retry_after_max=2)),
        "requests, `Retry(3, status_forcelist=[429], respect_retry_after_header=False)`": lambda: http(
            "GET", url, Retry(3, status_forcelist=[429], respect_retry_after_header=False)
        ),
        "grpcio": lambda: unary(url, case),
        "grpcio, `retryPolicy`": lambda: unary(url, case, RETRY_POLICY),
        "grpcio, `retryPolicy`, `timeout=2`": lambda: unary(url, case, RETRY_POLICY, timeout=2),
    }[client]()
)
