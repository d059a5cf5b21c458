"""The secret of a run, and messages signed with it: a process without the secret cannot join a run or forge a message.

    HLAT_RUN_SECRET, from the launcher ---+
    <run.dir>/.secret-PORT-ROUND, 0600 ---+--Signer--> HMAC-SHA256 of the messages of the rendezvous
    neither: nothing is authenticated ----+

The first process creates the file, and rank 0 removes it after the rendezvous. It proves that a process can read the
run's folder as the same user.
"""

import hashlib
import hmac
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from hlat.runtime.errors import LaunchError, StorageError

RUN_SECRET_ENV = "HLAT_RUN_SECRET"
"""Environment variable of a run's secret: any text, the same for all of its processes."""

_DIGITS = 64  # hexadecimal digits of a secret in a file: 256 bits
_WRITING = 10.0  # seconds to wait for the process that writes the file


class Signer:
    """Signs and verifies messages with the key of a run (HMAC-SHA256); with an empty key, any process can."""

    SIZE = 32
    """Bytes of a signature."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def sign(self, *fields: bytes) -> bytes:
        """Signature of byte strings and their boundaries: 32 bytes."""
        # With lengths: two sequences with the same concatenation have different signatures.
        framed = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
        return hmac.new(self._key, framed, hashlib.sha256).digest()

    def is_valid(self, signature: bytes, *fields: bytes) -> bool:
        return hmac.compare_digest(signature, self.sign(*fields))  # in constant time

    def derive(self, *fields: bytes) -> "Signer":
        return Signer(self.sign(*fields))

    def __repr__(self) -> str:
        return "Signer"  # the key must not get into a log


def run_signer(file: Path | None) -> Signer:
    """Return the signer of this run; LaunchError for a file without a secret, StorageError if it cannot be read."""
    # The launcher's secret, else that of a file in a folder that all processes share.
    given = os.environ.get(RUN_SECRET_ENV, "")
    if given or file is None:
        return Signer(given.encode("utf-8", "surrogateescape"))
    return Signer(_shared_secret(file).encode())


def _shared_secret(file: Path) -> str:
    try:
        with suppress(FileExistsError):
            # O_EXCL: the first process creates it, the others read it.
            descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(descriptor, "w") as new:
                new.write(secrets.token_hex(_DIGITS // 2))
        deadline = time.monotonic() + _WRITING
        while len(text := file.read_text()) < _DIGITS and time.monotonic() < deadline:
            time.sleep(0.01)  # the process that created it has not written it yet
    except OSError as error:
        raise StorageError(f"{file}: cannot be created and read: {error.strerror}. Give another run.dir.") from error
    if len(text) != _DIGITS:
        raise LaunchError(f"{file}: contains no secret of a run. Remove it, and start all processes again.")
    return text
