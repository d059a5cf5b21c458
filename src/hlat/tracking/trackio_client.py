"""Trackio: ``tracking.trackio``; offline runs are written to databases in <run.dir>/trackio, for ``trackio show``."""

import os
from collections.abc import Mapping

from hlat.tracking.hosted import HostedRun


class TrackioClient:
    """A run of Trackio. The Hugging Face token for a Space comes from the environment or from ``hf auth login``."""

    def open(self, run: HostedRun, saved_id: str | None) -> str:
        if run.is_offline:
            os.environ["TRACKIO_DIR"] = str(run.folder("trackio"))
        import trackio  # noqa: PLC0415

        # Trackio identifies a run by its name, which gets a suffix for that.
        name = saved_id or f"{run.name}-{os.urandom(4).hex()}"
        self._run = trackio.init(
            project=run.settings["project"],
            name=name,
            space_id=None if run.is_offline else run.settings["space"],
            config=dict(run.recipe),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish()
