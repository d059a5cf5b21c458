"""A store of torch.distributed whose values are signed, because anybody can write to the TCP store below it.

gloo of torch --set, get--> SignedStore --signature, value--> TCPStore
"""

from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from hlat.runtime.distributed.run_secret import Signer
from hlat.runtime.errors import LaunchError


def put_bytes(store: Store, key: str, value: bytes) -> None:
    """Set a value of bytes."""
    store.set(key, value)  # type: ignore[arg-type]  # torch takes both, and its stubs say str only


class SignedStore(Store):
    """A store whose values carry a signature; torch's gloo exchanges the addresses of peers through it.

    Attributes:
        plain: the underlying store, without signatures.
    """

    def __init__(self, plain: Store, signer: Signer) -> None:
        super().__init__()
        self.plain, self._signer = plain, signer

    def set(self, key: str, value: bytes | str) -> None:
        """Sign a value and store it."""
        content = value.encode() if isinstance(value, str) else value
        put_bytes(self.plain, key, self._signer.sign(key.encode(), content) + content)

    def get(self, key: str) -> bytes:
        """Return a value.

        Raises:
            LaunchError: its signature is not valid.
        """
        value = self.plain.get(key)
        signature, content = value[: Signer.SIZE], value[Signer.SIZE :]
        if not self._signer.is_valid(signature, key.encode(), content):
            raise LaunchError(f"the store of the run contains a value at {key} that no process of the run has written.")
        return content

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values; errors as for ``get``."""
        return [self.get(key) for key in keys]

    def has_extended_api(self) -> bool:
        """Return False: torch must not use operations that bypass the signatures."""
        return False

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        self.plain.wait(keys, *([] if timeout is None else [timeout]))

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys exist."""
        return self.plain.check(keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it. Counters are not signed, because the server adds them up."""
        return self.plain.add(key, amount)

    def delete_key(self, key: str) -> bool:
        """Delete a key; return True if it existed."""
        return self.plain.delete_key(key)

    def num_keys(self) -> int:
        """Return the number of keys in the store."""
        return self.plain.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the underlying store."""
        self.plain.set_timeout(timeout)
