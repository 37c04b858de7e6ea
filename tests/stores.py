"""The S3 server of `make test-stores`, which is moto's."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import boto3
import pytest
from moto.server import ThreadedMotoServer


@contextmanager
def s3_bucket() -> Iterator[str]:
    """URL of an empty bucket; boto3 and s3fs, also of processes started meanwhile, find its server by variables."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # each request, which tests of log lines would read
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        variables = {
            "AWS_ENDPOINT_URL_S3": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        with pytest.MonkeyPatch.context() as environment:
            for name, value in variables.items():
                environment.setenv(name, value)
            boto3.client("s3").create_bucket(Bucket="trackway")
            yield "s3://trackway"
    finally:
        server.stop()
