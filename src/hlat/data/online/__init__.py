"""Text becomes samples while the model trains.

    catalogue    files -> blocks that can be opened by themselves
    dealing      global sample -> stream, and which rank tokenizes it; stream -> its blocks, by formula
    stream       documents of one stream of one source -> rows; a place in it is three numbers
    worker       a process: the rows of some streams, in the order in which they are wanted
    feed         the rows of this rank's part of each batch, and how far every stream has come
    setup        what is done once: tokenizer, validation split, catalogue

Which tokens form global sample g depends on the data section and the seed. A stream needs no other stream, so it may be
tokenized anywhere; where it goes on is all the state there is.
"""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.data.online.dataset import OnlineData
    from hlat.data.online.loader import OnlineLoader, StreamProgress
    from hlat.data.online.prepare import prepare_online

__getattr__ = lazily(
    __name__,
    {
        "dataset": ("OnlineData",),
        "loader": (
            "OnlineLoader",
            "StreamProgress",
        ),
        "prepare": ("prepare_online",),
    },
)

__all__ = ["OnlineData", "OnlineLoader", "StreamProgress", "prepare_online"]
