"""The mesh: coordinates of ranks on the axes of a parallel layout, process groups, and collectives."""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.parallel.mesh.collectives import BUCKET_BYTES, all_gather, all_reduce_together, reduce_scatter
    from hlat.parallel.mesh.group_trial import try_groups
    from hlat.parallel.mesh.mesh_layout import AXES, Coordinates, Layout
    from hlat.parallel.mesh.process_groups import ProcessGroups, create_process_groups, group_problems, rank_groups

__getattr__ = lazily(
    __name__,
    {
        "collectives": (
            "BUCKET_BYTES",
            "all_gather",
            "all_reduce_together",
            "reduce_scatter",
        ),
        "group_trial": ("try_groups",),
        "mesh_layout": (
            "AXES",
            "Coordinates",
            "Layout",
        ),
        "process_groups": (
            "ProcessGroups",
            "create_process_groups",
            "group_problems",
            "rank_groups",
        ),
    },
)

__all__ = [
    "AXES",
    "BUCKET_BYTES",
    "Coordinates",
    "Layout",
    "ProcessGroups",
    "all_gather",
    "all_reduce_together",
    "create_process_groups",
    "group_problems",
    "rank_groups",
    "reduce_scatter",
    "try_groups",
]
