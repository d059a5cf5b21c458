"""A store of torch.distributed whose values are believed only with a signature.

torch's gloo --set, get--> SignedStore --signature, value--> the store over TCP, which anybody may write to
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
    """A store in which values carry a signature; torch's gloo reads and writes the addresses of peers through it.

    Attributes:
        plain: the same without signatures.
    """

    def __init__(self, plain: Store, seal: Signer) -> None:
        super().__init__()
        self.plain, self._seal = plain, seal

    def set(self, key: str, value: bytes | str) -> None:
        content = value.encode() if isinstance(value, str) else value
        put_bytes(self.plain, key, self._seal.sign(key.encode(), content) + content)

    def get(self, key: str) -> bytes:
        value = self.plain.get(key)
        signature, content = value[: Signer.SIZE], value[Signer.SIZE :]
        if not self._seal.is_valid(signature, key.encode(), content):
            raise LaunchError(f"the store of the run holds something at {key} that no process of the run has written.")
        return content

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def has_extended_api(self) -> bool:
        return False

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.plain.wait(keys, *([] if timeout is None else [timeout]))

    def check(self, keys: list[str]) -> bool:
        return self.plain.check(keys)

    def add(self, key: str, amount: int) -> int:
        """Counts are not signed: the server adds them up."""
        return self.plain.add(key, amount)

    def delete_key(self, key: str) -> bool:
        return self.plain.delete_key(key)

    def num_keys(self) -> int:
        return self.plain.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self.plain.set_timeout(timeout)
