"""An S3 of our own on the loopback interface: moto's server, somebody else's idea of what S3 answers."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

SECRET = "Y3JlZGVudGlhbHMtbmV2ZXItYXBwZWFy"
BUCKET = "models"


@contextmanager
def bucket() -> Iterator[str]:
    """The URL of a folder in an empty bucket, for which the environment holds all that S3 asks for."""
    import fsspec
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    reset = urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset).close()  # or a server of before has left its buckets in this process
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "tester")
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
        files = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
        files.mkdir(BUCKET, region_name="eu-central-1")
        try:
            yield f"s3://{BUCKET}/store"
        finally:
            server.stop()
            type(files).clear_instance_cache()
