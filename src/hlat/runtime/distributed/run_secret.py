"""The secret of a run, and what is signed with it: who does not know it can neither join nor be believed.

    HLAT_RUN_SECRET, from the launcher --+
    <run.dir>/.secret-PORT-ATTEMPT, 0600 +--Seal--> HMAC-SHA256 of what processes tell each other while they meet
    neither: nothing is proved ----------+

The file is made by whichever process comes first, and removed once all have met. It proves that a process may read the
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
"""The environment variable of a run's secret: any text, the same for all of its processes."""

_DIGITS = 64  # hexadecimal, of a secret in a file: 256 bits
_WRITING = 10.0  # seconds that a process may take to write them


class Signer:
    """Signs with a key that all processes of a run have and nobody else.

    Args:
        key: empty where there is no secret: everybody can sign then.
    """

    SIZE = 32
    """Bytes of a signature."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def sign(self, *parts: bytes) -> bytes:
        """The signature of parts, as they are divided: 32 bytes."""
        framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return hmac.new(self._key, framed, hashlib.sha256).digest()

    def is_valid(self, signature: bytes, *parts: bytes) -> bool:
        """Whether it is theirs."""
        return hmac.compare_digest(signature, self.sign(*parts))

    def derive(self, *parts: bytes) -> "Signer":
        """Another seal, for what belongs to these parts only."""
        return Signer(self.sign(*parts))

    def __repr__(self) -> str:
        return "Signer"


def run_signer(file: Path | None) -> Signer:
    """The seal of this process's run.

    Args:
        file: in a folder that all its processes share; None where they share none.

    Raises:
        LaunchError: the file holds no secret.
        StorageError: it cannot be made or read.
    """
    given = os.environ.get(RUN_SECRET_ENV, "")
    if given or file is None:
        return Signer(given.encode("utf-8", "surrogateescape"))
    return Signer(_shared(file).encode())


def _shared(file: Path) -> str:
    """The secret in a file, which is made if there is none."""
    try:
        with suppress(FileExistsError):
            descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(descriptor, "w") as new:
                new.write(secrets.token_hex(_DIGITS // 2))
        deadline = time.monotonic() + _WRITING
        while len(text := file.read_text()) < _DIGITS and time.monotonic() < deadline:
            time.sleep(0.01)  # the process that made it is about to write
    except OSError as error:
        raise StorageError(f"{file}: cannot be made and read: {error.strerror}. Give another run.dir.") from error
    if len(text) != _DIGITS:
        raise LaunchError(f"{file}: holds no secret of a run. Remove it, and start all processes again.")
    return text
