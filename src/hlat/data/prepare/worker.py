"""A worker process: reads units from stdin, writes token files to disk, and one line of JSON per unit to stdout.

    parent --(a line of JSON, then the documents)--> worker --(unit files)--> staging folder
           <----------------- {"done": 17} or {"error": ...} ------------

It is started as a separate program (``python -m hlat.data.prepare.worker``) instead of forked, because the parent may
have threads of torch. It ends when its stdin is closed, so it never outlives the parent.
"""

import json
import os
import queue
import sys
import threading
import traceback
from pathlib import Path
from typing import IO, Any

from hlat.data.prepare.work_units import UnitSpan, WorkUnit, write_tokenized_unit
from hlat.data.sources.split import SplitRule
from hlat.data.stores.atomic_files import is_disk_error
from hlat.data.tokenizers.load import load_saved


def write_unit(stream: IO[bytes], unit: WorkUnit) -> None:
    """Send a unit to a worker."""
    span, split_rule = unit.span, unit.split_rule
    header = {
        "span": span.to_json(),
        "split_rule": vars(split_rule),
        "where": unit.where,
        "are_tokens": unit.are_tokens,
        "sizes": [len(document) for document in unit.documents],
    }
    stream.write(json.dumps(header).encode() + b"\n")
    for document in unit.documents:
        stream.write(document)
    stream.flush()


def read_unit(stream: IO[bytes]) -> WorkUnit | None:
    """Receive a unit; None at the end of the stream."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    header = json.loads(line)
    documents = [stream.read(size) for size in header["sizes"]]
    if [len(document) for document in documents] != header["sizes"]:
        return None
    span, split_rule = UnitSpan.from_json(header["span"]), SplitRule(**header["split_rule"])
    return WorkUnit(span, split_rule, documents, header["are_tokens"], header["where"])


def main() -> None:
    """Serve one parent. The first line of stdin is JSON: {"tokenizer": folder, "folder": staging, "dtype": name}.

    Ends without a word when stdin is closed, also before that line: the parent was interrupted or killed.
    """
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output printed by a library must not be mistaken for a reply
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return
    settings = json.loads(line)
    tokenizer = load_saved(Path(settings["tokenizer"]))
    units: queue.Queue[WorkUnit] = queue.Queue(maxsize=1)
    threading.Thread(target=_receive, args=(sys.stdin.buffer, units), daemon=True).start()
    while True:
        unit = units.get()
        reply: dict[str, Any]
        try:
            write_tokenized_unit(unit, tokenizer, Path(settings["folder"]), settings["dtype"])
            reply = {"done": unit.span.number}
        except Exception as error:
            reply = {"error": _describe(error)}
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def _receive(stream: IO[bytes], units: "queue.Queue[WorkUnit]") -> None:
    while (unit := read_unit(stream)) is not None:
        units.put(unit)
    os._exit(0)  # at once, even in the middle of a unit: the parent no longer waits for it


def _describe(error: Exception) -> dict[str, str]:
    """Return the kind and message from which the parent raises the same error."""
    if isinstance(error, OSError) and is_disk_error(error.errno):
        return {"kind": "storage", "message": os.strerror(error.errno or 0)}
    if type(error).__name__ == "DataError":
        return {"kind": "data", "message": str(error)}
    return {"kind": "bug", "message": "".join(traceback.format_exception(error))}


if __name__ == "__main__":
    main()
