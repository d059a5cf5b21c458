"""The hosted trackers: the one place that lists them.

name of a field of the recipe's ``tracking`` section -> client class, and the package that it needs
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from hlat.config import TrackingConfig
from hlat.runtime.errors import LaunchError


@dataclass(frozen=True)
class HostedEntry:
    """A hosted tracker.

    Attributes:
        client: "module:class" of its ``HostedClient``, imported in the helper process only.
        package: module that has to be installed; the extra of hlat has the name of the field.
    """

    client: str
    package: str


HOSTED: dict[str, HostedEntry] = {
    "wandb": HostedEntry("hlat.tracking.hosted.wandb_client:WandbClient", "wandb"),
    "mlflow": HostedEntry("hlat.tracking.hosted.mlflow_client:MlflowClient", "mlflow"),
    "trackio": HostedEntry("hlat.tracking.hosted.trackio_client:TrackioClient", "trackio"),
}
"""Hosted trackers by the name of their field in ``tracking``."""


def wanted(config: TrackingConfig) -> dict[str, dict[str, Any]]:
    """Return the sections of the hosted trackers that a recipe asks for, as JSON values, by name."""
    sections = {name: getattr(config, name) for name in HOSTED}
    return {name: section.model_dump(mode="json") for name, section in sections.items() if section is not None}


def check_installed(config: TrackingConfig) -> None:
    """Check that the packages of the hosted trackers of a recipe can be found; nothing is imported.

    Raises:
        LaunchError: some are not installed; names all of them, and the command that installs them.
    """
    missing = [name for name in wanted(config) if find_spec(HOSTED[name].package) is None]
    if missing:
        fields = " and ".join(f"tracking.{name}" for name in missing)
        raise LaunchError(
            f"{fields}: not installed here: {', '.join(HOSTED[name].package for name in missing)}. "
            f"Install it with pip install 'hlat[{','.join(missing)}]', or set {fields} to null."
        )
