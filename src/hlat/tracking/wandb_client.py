"""Weights & Biases: ``tracking.wandb``; offline runs are written to <run.dir>/wandb and sent by ``wandb sync``."""

import uuid
from collections.abc import Mapping

from hlat.tracking.hosted import HostedRun


class WandbClient:
    """A run of Weights & Biases. The API key comes from the environment or from ``wandb login``."""

    def open(self, run: HostedRun, saved_id: str | None) -> str:
        import wandb  # noqa: PLC0415

        run_id = saved_id or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            id=run_id,
            name=run.name,
            project=run.settings["project"],
            entity=run.settings["entity"],
            group=run.settings["group"],
            tags=list(run.settings["tags"]),
            config=dict(run.recipe),
            dir=run.run_dir,
            mode=run.settings["mode"],
            resume=None if run.is_offline else "allow",
            # Nothing of this process's console, code or git state is recorded.
            settings=wandb.Settings(console="off", disable_git=True, save_code=False, silent=True),
        )
        return run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)
