"""Models of the Hugging Face Hub by id: their files, downloaded once into the Hub's own cache, of one pinned commit.

    "Qwen/Qwen3-8B"             -> commit of the branch main
    "Qwen/Qwen3-8B@REVISION"    -> commit of a branch or tag, or the commit itself
    HubModel.snapshot(patterns) -> folder of the cache with these files of the commit
    id of a data set where a path is expected --dataset_id_advice--> what to write instead

The package huggingface_hub does it (tokenizers installs it), with its environment variables: HF_HOME for the cache,
HF_TOKEN for models that need permission, HF_HUB_OFFLINE, HF_ENDPOINT for a mirror. Without network a commit that is in
the cache is used.
"""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_MODEL_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
_FILE_ENDINGS = (".json", ".model", ".yaml", ".yml", ".bin", ".safetensors")

CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
)
WEIGHT_FILES = ("model*.safetensors", "model.safetensors.index.json")  # others are copies in other formats


class HubError(ValueError):
    """A model that the Hub does not give; the message ends a sentence and says what would work."""


@dataclass(frozen=True)
class HubModel:
    """A model of the Hub; prints as its id, with ``@revision`` if it has one."""

    name: str  # its id, ``owner/name``
    revision: str | None = None  # branch, tag or commit; None for the branch main

    @classmethod
    def parse(cls, text: str) -> "HubModel | None":
        """Read an id as recipes give it; None for a path, a URL, or the name of a file that exists."""
        found = _MODEL_ID.fullmatch(text)
        if found is None or text.endswith(_FILE_ENDINGS) or Path(text).exists():
            return None
        return cls(found[1], found[2])

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"

    def snapshot(self, patterns: Sequence[str]) -> Path:
        """Download the files that match these globs into the cache; return the folder of their commit.

        Raises:
            HubError: there is no such model, it needs permission, or neither network nor cache has it.
        """
        import huggingface_hub  # noqa: PLC0415 - only where a recipe names a model of the Hub
        from huggingface_hub import errors  # noqa: PLC0415

        try:
            with _progress_only_for(WEIGHT_FILES, patterns):
                folder = huggingface_hub.snapshot_download(
                    self.name, revision=self.revision, allow_patterns=list(patterns), library_name="hlat"
                )
        except errors.GatedRepoError as error:
            raise HubError(
                f"the model needs permission: accept its terms on {self._page()}, then log in with hf auth login or "
                "set HF_TOKEN"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise HubError(f"the model has no revision {self.revision!r}; {self._page()} lists them") from error
        except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
            raise HubError(
                f"it is neither a file or folder here nor a model that {_endpoint()} shows you; correct the name, or "
                "log in with hf auth login if the model is private"
            ) from error
        except (OSError, errors.HfHubHTTPError) as error:
            raise HubError(self._unreachable(patterns, error)) from error
        return Path(folder)

    def pinned(self, folder: Path) -> "HubModel":
        """Return the model of the commit that a folder of ``snapshot`` holds."""
        return HubModel(self.name, folder.name)

    def _page(self) -> str:
        return f"{_endpoint()}/{self.name}"

    def _unreachable(self, patterns: Sequence[str], error: Exception) -> str:
        from huggingface_hub import constants  # noqa: PLC0415

        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set"
        else:
            why = f"{_endpoint()} cannot be reached ({error.__cause__ or error})".replace("\n", " ")
        wanted = " ".join(f"--include '{pattern}'" for pattern in patterns)
        revision = "" if self.revision is None else f" --revision {self.revision}"
        return (
            f"there is no such file or folder here; as a model of the Hugging Face Hub it cannot be had, since {why}, "
            f"and the cache {constants.HF_HUB_CACHE} does not have it. Where there is network run: "
            f"hf download {self.name}{revision} {wanted} --local-dir {self.name.partition('/')[2]}; copy that folder "
            "here and name it instead"
        )


@contextmanager
def _progress_only_for(large: Sequence[str], patterns: Sequence[str]) -> Iterator[None]:
    from huggingface_hub.utils.tqdm import (  # noqa: PLC0415
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    # Bars at a terminal only, and only while large files may be downloaded.
    hide = not are_progress_bars_disabled() and not (set(large) & set(patterns) and sys.stderr.isatty())
    if hide:
        disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            enable_progress_bars()


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


_DATASET_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_DATA_ENDING = re.compile(r"\.(jsonl?|ndjson|parquet|pq|arrow|txt|csv|tsv|gz|zst|bin|idx|model|ya?ml)$", re.IGNORECASE)


def dataset_id_advice(path: str) -> str:
    """Return advice for a missing path in the form of an id, as ``HuggingFaceFW/fineweb``; else ""."""
    if _DATASET_ID.fullmatch(path) is None or _DATA_ENDING.search(path):
        return ""
    folder = path.partition("/")[2]
    return (
        f"If it is a data set of the Hugging Face Hub, name its files, as in hf://datasets/{path}/**/*.parquet; or "
        f"download them with `hf download {path} --repo-type dataset --local-dir {folder}`, and give "
        f"'{folder}/**/*.parquet'."
    )
