"""An S3-compatible server on a loopback port that it chooses: `python -m tests.support.s3_server BUCKET...`.

Prints its address, serves until its standard input ends. In a process of its own, so that what it imports and warns of
stays out of the tests.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading


@contextlib.contextmanager
def s3_server(*buckets):
    """Address of a running server that has these buckets, and nothing in them."""
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.support.s3_server", *buckets],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    timer = threading.Timer(60, child.kill)  # a server that does not come up must not hold the tests
    timer.start()
    try:
        address = child.stdout.readline().strip()
        timer.cancel()
        assert address, "the S3 server did not start"
        yield address
    finally:
        timer.cancel()
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def main():
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    client = boto3.client("s3", endpoint_url=address)
    for bucket in sys.argv[1:]:
        client.create_bucket(Bucket=bucket)
    print(address, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
