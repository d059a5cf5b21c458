"""A real S3-protocol server for tests: started, made to misbehave, killed and started again."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import boto3

from tests.support.launch.ports import free_port

SERVER = Path(__file__).with_name("s3_server.py")


class ObjectStore:
    """A server with one folder of objects; a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "objects" / "corpus").mkdir(parents=True)
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that point fsspec's backend to this server."""
        return {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "not-a-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def __enter__(self) -> "ObjectStore":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start the process and wait until it answers."""
        log = (self.folder / "server.log").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER), str(self.folder), str(self.port)], stdout=log, stderr=log
        )
        log.close()
        deadline = time.monotonic() + 600
        while not self._answers():
            assert self._process.poll() is None, (self.folder / "server.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def put(self, source: Path, key: str = "") -> None:
        """Copy a file or folder to the objects of the bucket ``corpus``; before the server starts, or through it."""
        target = self.folder / "objects" / "corpus" / key
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)

    def replace(self, key: str, content: bytes) -> None:
        """Put an object into the running server, and into its folder."""
        (self.folder / "objects" / "corpus" / key).write_bytes(content)
        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id="testing",
            aws_secret_access_key="not-a-secret",
            region_name="us-east-1",
        )
        client.put_object(Bucket="corpus", Key=key, Body=content)
        client.close()

    def misbehave(self, *faults: dict[str, object]) -> None:
        """From now on these faults; without any, none."""
        temporary = self.folder / "faults.tmp"
        temporary.write_text(json.dumps(faults))
        temporary.rename(self.folder / "faults.json")

    def requests(self) -> list[str]:
        """Method, path and range of every request so far."""
        log = self.folder / "requests.log"
        return log.read_text().splitlines() if log.exists() else []

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.endpoint}/moto-api/", timeout=1).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True
